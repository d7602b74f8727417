"""
The package's layout, computed from its source: imports point down, nothing is too long, vLLM's private names stay in
one room. Every check lists all that it finds.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT


SOURCE = ROOT / "src" / "tlt_trl"

# From top to bottom; a part may import what stands further down, and nothing of its own row but itself.
LAYERS = (
    {"__init__"},
    {"tools"},
    {"tlt_grpo_trainer"},
    {"drafter_saving"},
    {"inactive_drafter", "online_drafter", "sample_reallocation"},
    {"generation", "idle"},
    {"tlt_grpo_config"},
    {"drafter"},
    {"vllm_internals", "strategy", "telemetry", "upstream", "_version"},
)
# The one arrow inside a row.
ALLOWED = {("vllm_internals", "strategy.strategy")}

MAX_FILE_LINES = 450
MAX_TRAINER_LINES = 320
MAX_CLASS_LINES = 320
MAX_FUNCTION_CODE_LINES = 60

# Attributes of vLLM's objects that are not part of its interface.
PRIVATE_OF_VLLM = {
    "_enable_probabilistic_draft_probs",
    "_expand_kernel_impl",
    "_greedy_sample",
    "_last_draft_probs",
    "_maybe_share_lm_head",
    "_output_token_ids",
    "_sample_draft_tokens",
    "batch_queue",
    "draft_id_to_target_id",
    "driver_worker",
    "dynamic_sd_lookup",
    "engine_core",
    "kv_cache_config",
    "model_executor",
    "model_runner",
    "num_scheduled_tokens",
    "output_processor",
    "process_outputs",
    "quant_method",
    "rejection_sampler",
    "reload_weights",
    "request_states",
    "scheduled_spec_decode_tokens",
    "topk_topp_sampler",
    "update_draft_token_ids",
    "update_from_output",
}
PUBLIC_MODULES_OF_VLLM = {"vllm", "vllm.platforms", "vllm.sampling_params"}


def modules() -> dict[str, ast.Module]:
    """Syntax trees by module name inside the package; a sub-package's `__init__` has the package's name."""
    trees = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        trees[name] = ast.parse(path.read_text())
    return trees


TREES = modules()


def path_of(module: str) -> Path:
    stem = SOURCE.joinpath(*module.split("."))
    return stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")


def own_imports(module: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """
    Modules of this package that `module` imports, with the line.

    Also those inside functions and for type checkers: what a file cannot be read without, it depends on.
    """
    is_package = path_of(module).parent.name == module.split(".")[-1]
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tlt_trl":
            base = node.module.split(".")[1:]
        else:
            continue
        for alias in node.names:
            names = [".".join([*base, alias.name]), ".".join(base) or "__init__"]
            yield next(name for name in names if name in TREES), node.lineno


def part_of(module: str) -> str:
    return module.split(".")[0]


def layer(module: str) -> int | None:
    """Row of the module's part, from the top; `None` for a part that has no place."""
    return next((row for row, parts in enumerate(LAYERS) if part_of(module) in parts), None)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Lines from `def` on that are neither empty nor a comment nor the docstring."""
    docstring: range = range(0)
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        docstring = range(first.lineno, first.end_lineno + 1)
    numbers = (number for number in range(function.lineno, function.end_lineno + 1) if number not in docstring)
    return sum(bool(line) and not line.startswith("#") for line in (lines[number - 1].strip() for number in numbers))


def report(problems: list[str]) -> str:
    problems = list(dict.fromkeys(problems))  # an import of two names is one violation
    return f"{len(problems)} violations of the layout:\n" + "\n".join(problems)


def test_every_module_has_a_place():
    unknown = [module for module in TREES if layer(module) is None]
    assert not unknown, report(unknown)


def test_imports_point_down():
    problems = []
    for module, tree in TREES.items():
        for imported, line in own_imports(module, tree):
            rows = layer(module), layer(imported)
            is_inside = part_of(module) == part_of(imported) or (part_of(module), imported) in ALLOWED
            if not is_inside and None not in rows and rows[0] >= rows[1]:
                problems.append(f"{module}:{line} imports {imported}")
    assert not problems, report(problems)


def test_vllm_internals_imports_only_the_strategy():
    problems = [
        f"{module}:{line} imports {imported}"
        for module, tree in TREES.items()
        if part_of(module) == "vllm_internals"
        for imported, line in own_imports(module, tree)
        if part_of(imported) != "vllm_internals" and imported != "strategy.strategy"
    ]
    assert not problems, report(problems)


def test_there_is_no_circle():
    """Not by an import inside a function either, which is how a circle is dodged."""
    graph = {module: {name for name, _ in own_imports(module, tree)} - {module} for module, tree in TREES.items()}

    def reachable(module: str) -> set[str]:
        seen, waiting = set(), [module]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reached = {module: reachable(module) for module in graph}
    circles = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in graph
        if module in reached[module]
    }
    assert not circles, report([" <-> ".join(circle) for circle in sorted(circles)])


def test_nothing_is_too_long():
    problems = []
    for module, tree in TREES.items():
        lines = path_of(module).read_text().splitlines()
        most = MAX_TRAINER_LINES if module == "tlt_grpo_trainer" else MAX_FILE_LINES
        if len(lines) > most:
            problems.append(f"{module} has {len(lines)} lines, of {most}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and module != "tlt_grpo_config":
                length = node.end_lineno - node.lineno + 1
                if length > MAX_CLASS_LINES:
                    problems.append(f"{module}:{node.lineno} class {node.name} has {length} lines")
        for function in functions(tree):
            length = code_lines(function, lines)
            if length > MAX_FUNCTION_CODE_LINES:
                problems.append(f"{module}:{function.lineno} {function.name} has {length} lines of code")
    assert not problems, report(problems)


def test_private_names_of_vllm_stay_in_one_room():
    problems = []
    for module, tree in TREES.items():
        if part_of(module) == "vllm_internals":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in PRIVATE_OF_VLLM:
                problems.append(f"{module}:{node.lineno} reads .{node.attr}")
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported = [node.module]
            for name in imported:
                if name.split(".")[0] == "vllm" and name not in PUBLIC_MODULES_OF_VLLM:
                    problems.append(f"{module}:{node.lineno} imports {name}")
    assert not problems, report(problems)
