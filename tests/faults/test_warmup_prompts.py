"""
Kind of fault: half of what the run does. Here: `tlt-trl warmup` learns from other prompts than the run's.
"""

import json

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_chat_template

from tlt_trl import TLTGRPOConfig, TLTGRPOTrainer
from tlt_trl.tools import warmup
from tlt_trl.tools.cli import main


QUESTIONS = ["What is 2 + 3?", "Name a prime above 90."]
SYSTEM = "Answer in one line."
# A training script: tools beside code that is for the script alone.
SCRIPT = '''
def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


tools = [add]
if __name__ == "__main__":
    raise SystemExit("this would train")
'''


@pytest.fixture(scope="module")
def policy(make_tiny_policy, tmp_path_factory):
    """A policy with Qwen3's chat template and one token a byte, so that equal ids are equal texts."""
    directory = make_tiny_policy(tmp_path_factory.mktemp("policy"), vocab_size=300)
    words = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    fast.chat_template = qwen3_chat_template
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "train.py"
    path.write_text(SCRIPT)
    return path


def tools_of(script):
    namespace = {"__name__": "train"}
    exec(script.read_text(), namespace)
    return namespace["tools"]


def prompts_of_the_run(policy, output_dir, prompts, tools=None, **arguments):
    """What a trainer passes to its engine; that engine is not needed for it."""
    args = TLTGRPOConfig(str(output_dir), use_cpu=True, bf16=False, report_to="none", use_vllm=False, **arguments)
    trainer = TLTGRPOTrainer(
        policy, lambda completions, **kwargs: [0.0] * len(completions), args, Dataset.from_list(prompts), tools=tools
    )
    return trainer._tokenize_prompts([row["prompt"] for row in prompts])[0]


@pytest.fixture
def prompts_of_the_tool(monkeypatch, policy, tmp_path):
    """Prompts that `tlt-trl warmup` would sample answers to."""

    def run(rows, *options):
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        seen = []
        monkeypatch.setattr(warmup, "warm_up", lambda model, prompts, *args, **kwargs: seen.append(prompts) or {})
        words = ["--model", policy, "--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out")]
        assert main(["warmup", *words, *options]) == 0
        return seen[0]

    return run


def messages(*roles_and_texts):
    return {"prompt": [{"role": role, "content": text} for role, text in roles_and_texts]}


def conversations(system=None):
    before = [] if system is None else [("system", system)]
    return [messages(*before, ("user", question)) for question in QUESTIONS]


class TestPromptsAreThoseOfTheRun:
    def compare(self, policy, tmp_path, mine, theirs):
        run = prompts_of_the_run(policy, tmp_path / "run", **mine)
        assert theirs == run
        return [AutoTokenizer.from_pretrained(policy).decode(ids) for ids in run]

    def test_chat_template_kwargs(self, policy, tmp_path, prompts_of_the_tool):
        kwargs = {"enable_thinking": False}
        tool = prompts_of_the_tool(conversations(), "--chat_template_kwargs", json.dumps(kwargs))
        mine = {"prompts": conversations(), "chat_template_kwargs": kwargs}
        texts = self.compare(policy, tmp_path, mine, tool)
        assert all(text.endswith("<think>\n\n</think>\n\n") for text in texts)
        assert prompts_of_the_tool(conversations()) != tool

    def test_tools_of_the_training_script(self, policy, tmp_path, prompts_of_the_tool, script):
        tool = prompts_of_the_tool(conversations(), "--tools", f"{script}:tools")
        texts = self.compare(policy, tmp_path, {"prompts": conversations(), "tools": tools_of(script)}, tool)
        assert all("Adds two numbers." in text for text in texts)

    def test_schemas_of_tools(self, policy, tmp_path, prompts_of_the_tool, script):
        from transformers.utils import get_json_schema

        (tmp_path / "tools.json").write_text(json.dumps([get_json_schema(tool) for tool in tools_of(script)]))
        tool = prompts_of_the_tool(conversations(), "--tools", str(tmp_path / "tools.json"))
        self.compare(policy, tmp_path, {"prompts": conversations(), "tools": tools_of(script)}, tool)

    def test_system_prompt_before_messages_and_texts(self, policy, tmp_path, prompts_of_the_tool):
        mine = {"prompts": conversations(SYSTEM)}
        for rows in (conversations(), [{"prompt": question} for question in QUESTIONS]):
            tool = prompts_of_the_tool(rows, "--system_prompt", SYSTEM)
            texts = self.compare(policy, tmp_path, mine, tool)
            assert all(SYSTEM in text for text in texts)

    def test_all_at_once_from_a_data_set(self, policy, tmp_path, script, monkeypatch):
        seen = []
        monkeypatch.setattr(warmup, "warm_up", lambda model, prompts, *args, **kwargs: seen.append(prompts) or {})
        Dataset.from_list([{"question": question} for question in QUESTIONS]).to_parquet(tmp_path / "rows.parquet")
        options = ["--dataset", tmp_path / "rows.parquet", "--prompt_column", "question", "--tools", f"{script}:tools"]
        options += ["--system_prompt", SYSTEM, "--chat_template_kwargs", '{"enable_thinking": false}']
        assert main(["warmup", "--model", policy, "--output", str(tmp_path / "out"), *map(str, options)]) == 0
        mine = {"prompts": conversations(SYSTEM), "tools": tools_of(script)}
        self.compare(policy, tmp_path, mine | {"chat_template_kwargs": {"enable_thinking": False}}, seen[0])

    def test_texts_have_no_template(self, policy, tmp_path, prompts_of_the_tool):
        rows = [{"prompt": question} for question in QUESTIONS]
        assert self.compare(policy, tmp_path, {"prompts": rows}, prompts_of_the_tool(rows)) == QUESTIONS

    def test_several_turns(self, policy, tmp_path, prompts_of_the_tool):
        rows = [messages(("user", "Hello"), ("assistant", "Hello."), ("user", question)) for question in QUESTIONS]
        self.compare(policy, tmp_path, {"prompts": rows}, prompts_of_the_tool(rows))

    def test_tools_change_the_template_of_earlier_turns(self, policy, tmp_path, prompts_of_the_tool, script):
        thoughts = "<think>\nA greeting.\n</think>\n\nHello."
        rows = [messages(("user", "Hello"), ("assistant", thoughts), ("user", question)) for question in QUESTIONS]
        tool = prompts_of_the_tool(rows, "--tools", f"{script}:tools")
        texts = self.compare(policy, tmp_path, {"prompts": rows, "tools": tools_of(script)}, tool)
        assert all("A greeting." in text for text in texts)  # the template of the tokenizer leaves it out


class TestWhatWouldBeIgnoredIsAnError:
    @pytest.mark.parametrize(
        ("rows", "options", "message"),
        [
            (
                [{"prompt": "a text"}],
                ["--chat_template_kwargs", '{"enable_thinking": false}'],
                "prompts are texts, which the trainer passes on without a chat template",
            ),
            (conversations(SYSTEM), ["--system_prompt", SYSTEM], "has a system message already"),
            ([{"prompt": "a text"}, *conversations()], [], "Some prompts are texts and some are lists of messages"),
            (conversations(), ["--tools", "nowhere.py:tools"], "there is no file nowhere.py"),
        ],
    )
    def test_is_named(self, prompts_of_the_tool, rows, options, message):
        with pytest.raises(ValueError, match=message):
            prompts_of_the_tool(rows, *options)

    def test_a_file_without_the_list(self, prompts_of_the_tool, script):
        with pytest.raises(ValueError, match="that is no list of tools. Give FILE.py:NAME"):
            prompts_of_the_tool(conversations(), "--tools", f"{script}:TOOLS")

    @pytest.mark.parametrize("text", ["enable_thinking=False", "[1]"])
    def test_what_is_no_json_object(self, prompts_of_the_tool, text, capsys):
        with pytest.raises(SystemExit):
            prompts_of_the_tool(conversations(), "--chat_template_kwargs", text)
        assert "is no JSON" in capsys.readouterr().err
