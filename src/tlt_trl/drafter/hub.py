"""The drafter on the Hub: a repository of its own with a model card, pushed while training goes on."""

import importlib.util
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard, ModelCardData

from .._version import __version__
from .checkpoint import DrafterSnapshot
from .configuration_drafter import DrafterConfig
from .privacy import SecretsFoundError, refuse_secrets


logger = logging.getLogger(__name__)

PLOT_NAME = "acceptance.png"
# In the model card; the plot has every step.
MAX_HISTORY_ROWS = 12
# What pays on most machines at small batches; serving tunes it.
SERVED_DRAFT_TOKENS = 3
# Beside the drafter in a checkpoint, and nobody's business.
NOT_PUSHED = ["training/*", "*.partial"]

CARD = """---
{metadata}
---

# {name}

A drafter for speculative decoding of {policy_link}: an [EAGLE-3](https://huggingface.co/papers/2503.01840) head that
tlt-trl trained from the hidden states of this policy, after the method of
[TLT](https://huggingface.co/papers/2511.16665). Speculation changes the speed of decoding, never its distribution.

## Serve

vLLM:

```bash
vllm serve {policy} --speculative-config \\
  '{{"method": "eagle3", "model": "{repo_id}", "num_speculative_tokens": {tokens}}}'
```

SGLang:

```bash
python -m sglang.launch_server --model-path {policy} \\
  --speculative-algorithm EAGLE3 --speculative-draft-model-path {repo_id} \\
  --speculative-num-steps {tokens} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens_plus_one}
```

It fits no other model than this policy, and drafts best what it was trained on. Few running requests gain most;
measure other numbers of draft tokens, and without.

## Training

{facts}

{acceptance}
Everything else that is known about the run is in `provenance.json`.
"""


def acceptance_history(log_history: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """
    Acceptance of the training rollouts, out of a trainer's log history.

    Args:
        log_history (`Sequence[Mapping[str, Any]]`):
            `trainer.state.log_history`.

    Returns:
        `list[dict[str, float]]`: For each log of training with rollouts, `step`, `acceptance_length` and the shares of
        accepted draft tokens, `position_1` and so on.
    """
    prefix = "tlt/acceptance/"
    return [
        {"step": log["step"], "acceptance_length": log["tlt/acceptance_length"]}
        | {name.removeprefix(prefix): value for name, value in log.items() if name.startswith(prefix)}
        for log in log_history
        if "tlt/acceptance_length" in log
    ]


def positions(history: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of the positions of draft tokens in a history, in their order."""
    names = {name for row in history for name in row if name.startswith("position_")}
    return sorted(names, key=lambda name: int(name.removeprefix("position_")))


def write_model_card(
    directory: str | os.PathLike,
    repo_id: str,
    config: DrafterConfig,
    provenance: Mapping[str, Any],
    history: Sequence[Mapping[str, float]] = (),
) -> None:
    """
    Writes `README.md` and, where matplotlib is installed and there is something to plot, `acceptance.png`.

    Args:
        directory (`str` or `os.PathLike`):
            Folder of the saved drafter.
        repo_id (`str`):
            Name under which it will be found; a folder is as good for the engines.
        config ([`DrafterConfig`]):
            Configuration of the drafter.
        provenance (`Mapping[str, Any]`):
            As in `provenance.json`. `policy` becomes the base model of the card.
        history (`Sequence[Mapping[str, float]]`, *optional*, defaults to `()`):
            See [`acceptance_history`].
    """
    directory = Path(directory)
    policy = str(provenance.get("policy", "<policy>"))
    on_hub = "policy" in provenance and not os.path.isabs(policy) and not os.path.isdir(policy)
    metadata = ModelCardData(
        base_model=policy if on_hub else None,
        tags=["eagle3", "speculative-decoding", "tlt", "trl"],
    )
    card = CARD.format(
        metadata=metadata.to_yaml(),
        name=repo_id.rstrip("/").split("/")[-1],
        policy_link=f"[{policy}](https://huggingface.co/{policy})" if on_hub else f"`{policy}`",
        policy=policy,
        repo_id=repo_id,
        tokens=SERVED_DRAFT_TOKENS,
        tokens_plus_one=SERVED_DRAFT_TOKENS + 1,
        facts=_facts_table(config, provenance),
        acceptance=_acceptance(history),
    )
    ModelCard(card).save(directory / "README.md")
    if _plots(history):
        _plot(history, directory / PLOT_NAME)


def _facts_table(config: DrafterConfig, provenance: Mapping[str, Any]) -> str:
    rows = {
        "policy": provenance.get("policy"),
        "revision of the policy the run began with": provenance.get("policy_revision"),
        "steps of the policy": provenance.get("policy_steps"),
        "steps of the drafter": provenance.get("drafter_steps"),
        "tokens the drafter was trained on": provenance.get("tokens_trained"),
        "draft vocabulary": f"{config.draft_vocab_size} of {config.vocab_size} tokens",
        "policy layers it reads (their inputs)": config.eagle_aux_hidden_state_layer_ids,
        "acceptance length": _rounded(provenance.get("acceptance_length")),
    }
    shares = provenance.get("acceptance_by_position") or []
    if shares:
        rows["accepted by position of the draft token"] = " / ".join(f"{share:.2f}" for share in shares)
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items() if value)])


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _plots(history: Sequence[Mapping[str, float]]) -> bool:
    return len(history) > 1 and importlib.util.find_spec("matplotlib") is not None


def _acceptance(history: Sequence[Mapping[str, float]]) -> str:
    """Tokens emitted per verification over the steps of the run: a picture where possible, and a table."""
    if not history:
        return ""
    names = positions(history)
    stride = -(-len(history) // MAX_HISTORY_ROWS)
    # Counted from the end: the last step is the one that was saved.
    shown = history[::-1][::stride][::-1]
    lines = ["Acceptance in the rollouts of the run:", ""]
    if _plots(history):
        lines += [f"![acceptance over steps]({PLOT_NAME})", ""]
    lines.append("| step | acceptance length | " + "".join(f"{_ordinal(name)} | " for name in names))
    lines.append("|---|---|" + "---|" * len(names))
    for row in shown:
        cells = [f"{row[name]:.2f}" if name in row else "" for name in names]
        lines.append(f"| {row['step']} | {row['acceptance_length']:.3f} | " + "".join(f"{cell} | " for cell in cells))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _ordinal(name: str) -> str:
    return f"draft token {name.removeprefix('position_')}"


def _plot(history: Sequence[Mapping[str, float]], path: Path) -> None:
    # Without pyplot, whose global state is not made for threads.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["step"] for row in history], [row["acceptance_length"] for row in history], marker=".")
    axes.set_xlabel("step")
    axes.set_ylabel("tokens per verification")
    axes.set_ylim(bottom=1.0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def upload(
    directory: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str = "Upload drafter",
) -> CommitInfo:
    """
    Uploads a folder to a model repository, which is made when missing.

    Args:
        directory (`str` or `os.PathLike`):
            Folder of the drafter.
        repo_id (`str`):
            Repository; without a namespace, one of the token's user.
        private (`bool`, *optional*):
            Visibility of a new repository. `None` is what the organisation has set.
        revision (`str`, *optional*):
            Branch to commit to, made when missing.
        token (`str`, *optional*):
            Token with the right to write. Defaults to the one of `hf auth login`.
        commit_message (`str`, *optional*, defaults to `"Upload drafter"`):
            Message of the commit.

    Returns:
        [`~huggingface_hub.CommitInfo`]: The commit.

    Raises:
        [`~tlt_trl.drafter.privacy.SecretsFoundError`]: If a text file holds what looks like a secret.
    """
    refuse_secrets(directory, NOT_PUSHED, {"the token of this push": token})
    api = HfApi(token=token, library_name="tlt-trl", library_version=__version__)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=directory,
        commit_message=commit_message,
        revision=revision,
        ignore_patterns=NOT_PUSHED,
    )


def push_snapshot(
    snapshot: DrafterSnapshot,
    repo_id: str,
    provenance: Mapping[str, Any],
    history: Sequence[Mapping[str, float]] = (),
    **hub_kwargs: Any,
) -> CommitInfo:
    """
    Writes a drafter and its model card to a folder for the time of the call, and uploads that.

    Args:
        snapshot ([`~tlt_trl.drafter.checkpoint.DrafterSnapshot`]):
            The drafter.
        repo_id, provenance, history:
            As in [`write_model_card`].
        **hub_kwargs:
            As in [`upload`].
    """
    with tempfile.TemporaryDirectory(prefix="tlt-trl-push-") as folder:
        snapshot.write(folder, provenance)
        write_model_card(folder, repo_id, snapshot.config, provenance, history)
        return upload(folder, repo_id, **hub_kwargs)


class BackgroundPusher:
    """
    Pushes drafters one after the other in a thread; a push that fails is reported and forgotten.

    Args:
        repo_id (`str`):
            Repository of the drafter.
        private (`bool`, *optional*):
            Visibility of a new repository.
        revision (`str`, *optional*):
            Branch to commit to.
        token (`str`, *optional*):
            Token with the right to write.
        always (`bool`, *optional*, defaults to `False`):
            Whether a push waits for its predecessor to end, instead of being left out while that one is on its way.
            Each that waits holds a copy of the drafter.
    """

    def __init__(
        self,
        repo_id: str,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        always: bool = False,
    ):
        self.repo_id = repo_id
        self.always = always
        self._hub_kwargs = {"private": private, "revision": revision, "token": token}
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter-push")
        self._last: Future | None = None

    @property
    def accepts(self) -> bool:
        """Whether a push would be begun now."""
        return self.always or self._last is None or self._last.done()

    def push(
        self,
        snapshot: DrafterSnapshot,
        provenance: Mapping[str, Any],
        history: Sequence[Mapping[str, float]],
        commit_message: str,
        local_copy: str,
    ) -> bool:
        """
        Begins a push, unless one is on its way already.

        Args:
            snapshot ([`~tlt_trl.drafter.checkpoint.DrafterSnapshot`]):
                The drafter.
            provenance, history:
                As in [`write_model_card`].
            commit_message (`str`):
                Message of the commit.
            local_copy (`str`):
                Folder from which a failed push can be repeated.

        Returns:
            `bool`: Whether it was begun.
        """
        if not self.accepts:
            return False
        self._last = self._executor.submit(self._push, snapshot, provenance, history, commit_message, local_copy)
        return True

    def join(self) -> None:
        """Waits for the pushes that were begun."""
        if self._last is not None:
            self._last.result()

    def _push(self, snapshot, provenance, history, commit_message, local_copy) -> None:
        try:
            push_snapshot(
                snapshot, self.repo_id, provenance, history, commit_message=commit_message, **self._hub_kwargs
            )
        except SecretsFoundError as error:
            logger.error("The drafter was not pushed to %s. Training goes on. %s", self.repo_id, error)
        except Exception as error:  # whatever a network can think of, and none of it is worth a training run
            options = " --private" if self._hub_kwargs["private"] else ""
            if self._hub_kwargs["revision"] is not None:
                options += f" --revision {self._hub_kwargs['revision']}"
            logger.error(
                "The drafter was not pushed to %s: %s: %s\nTraining goes on. To repeat the push: "
                "`trainer.push_drafter_to_hub()`, or `hf upload %s %s . --exclude 'training/*'%s`.",
                self.repo_id,
                type(error).__name__,
                error,
                self.repo_id,
                local_copy,
                options,
            )
