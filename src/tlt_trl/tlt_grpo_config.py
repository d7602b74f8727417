from dataclasses import MISSING, dataclass, field, fields
from typing import Any, cast

from trl import GRPOConfig

from .strategy.strategy import Strategy, check_strategies


SELECTORS = ("fixed", "beg_mab", "cost_model", "auto")
ON_UNSUPPORTED = ("disable", "error")
SAMPLE_REALLOCATION = ("off", "auto", "prefill")
MAX_DRAFT_TOKENS = 16
DEFAULT_STRATEGIES = ["eagle3 x1", "eagle3 x2", "eagle3 x3", "eagle3 x5", "ngram x4"]
DEFAULT_FIXED_STRATEGIES = ["eagle3 x3"]

# Keys of vLLM's `speculative_config` that are not the user's, and what says the same.
OWN_SPECULATIVE_KEYS = {
    "method": "name methods in `speculation_strategies`",
    "model": "use `drafter_model_name_or_path`",
    "revision": "use `drafter_model_name_or_path`",
    "code_revision": "use `drafter_model_name_or_path`",
    "num_speculative_tokens": "name numbers of draft tokens in `speculation_strategies`",
    "num_speculative_tokens_per_batch_size": "`speculation_selector` chooses by batch size",
    "draft_sample_method": "name it in `speculation_strategies`, as in 'eagle3 x3 probabilistic'",
    "quantization": "the drafter's weights are pushed unquantised",
    "draft_load_config": "the drafter is loaded from a folder that the trainer writes",
    "parallel_drafting": "the drafter is trained to draft token by token",
    "rejection_sample_method": "only vLLM's standard method was checked to be exact",
    "synthetic_acceptance_rates": "synthetic acceptance is not exact",
    "synthetic_acceptance_length": "synthetic acceptance is not exact",
}

# What only drafter training uses.
DRAFTER_TRAINING_FIELDS = (
    "drafter_time_budget",
    "drafter_learning_rate",
    "drafter_background_training",
    "feature_buffer_tokens",
)


@dataclass
class TLTGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`TLTGRPOTrainer`].

    It adds to [`~trl.GRPOConfig`] the parameters of speculative rollouts and of the drafter that is trained online.
    All of them are inactive unless `use_vllm=True` and `vllm_mode="colocate"`. A value that would be ignored, such as
    a threshold that the chosen selector does not read, is an error.

    Parameters:
        > Parameters that control speculative rollouts

        speculation_selector (`str`, *optional*, defaults to `"auto"`):
            How the strategy of every engine step is chosen. `'fixed'`: always the same. `'beg_mab'`: bucketed
            epsilon-greedy bandit of [TLT](https://huggingface.co/papers/2511.16665). `'cost_model'`: fitted step-time
            model as in [RLHFSpec](https://huggingface.co/papers/2512.04752). `'auto'`: the cost model as prior,
            corrected by a bandit. The adaptive ones spend a few steps per rollout on trying alternatives and turn
            speculation off where it does not pay; `'fixed'` never explores and can lose at large batches.
        speculation_strategies (`list[str]`, *optional*):
            Strategies to choose from: a method and a number of draft tokens, such as `'eagle3 x3'` (the drafter),
            `'eagle3 x3 probabilistic'` (draft tokens sampled, not the best ones; slower to draft, and accepted more
            often where the drafter knows the policy's distribution well) or `'ngram x4'` (tokens looked up in earlier
            answers to the same prompt; needs synchronous scheduling). All are lossless. Decoding without drafts is
            always a choice; each further one costs some exploration, and the longest sizes the engine's buffers and
            the drafter's training. `None` means `['eagle3 x1', 'eagle3 x2', 'eagle3 x3', 'eagle3 x5', 'ngram x4']`,
            and `['eagle3 x3']` with `speculation_selector='fixed'`, which takes exactly one.
        speculation_activation_threshold (`int`, *optional*):
            Largest number of running requests at which speculation is on (TLT uses 32); only with
            `speculation_selector='fixed'`. `None` keeps it on always.
        speculation_on_unsupported (`str`, *optional*, defaults to `"disable"`):
            What to do where a run cannot speculate and stay exact: a sampling parameter such as `min_p`, a policy that
            is quantised or of a class that vLLM cannot draft for, an engine that fails the check at start-up.
            `'disable'` goes on as plain TRL does, without drafter, and says once why; `'error'` stops.

        > Parameters that control the engine

        vllm_engine_kwargs (`dict[str, Any]`, *optional*):
            Further keyword arguments for `vllm.LLM`, such as `{'max_num_seqs': 64}`. They override those that TRL
            passes, but may not hold `disable_log_stats`. A `speculative_config` among them adds to the trainer's own,
            such as `{'disable_eagle_block_drop': True}`; keys that the trainer sets are an error.
        vllm_verify_weight_sync (`bool`, *optional*, defaults to `True`):
            Whether to read weights back from the engine after every sync and compare them with what was pushed. Costs
            about one pass over the weights; catches a stale or half-loaded engine, which would train on another
            policy's samples. Each rank of a tensor-parallel engine compares its slices.

        > Parameters that control sample reallocation

        sample_reallocation (`str`, *optional*, defaults to `"off"`):
            Whether a rank that has finished its rollout takes over unfinished samples of others: `'off'`, `'prefill'`
            (the text is sent and read again as a prompt), or `'auto'` (the same where it can be used: several engines,
            each of one process, that do not sleep, trained drafters, and neither tools, environments nor a
            `rollout_func`). The distribution of the samples stays the policy's.

        > Parameters that control the drafter

        drafter_model_name_or_path (`str`, *optional*):
            Folder or Hub id of an EAGLE-3 drafter to start from. `None` initialises one from the policy: its tokens
            are rejected until it has trained on some ten thousand tokens.
        drafter_vocab_size (`int`, *optional*):
            Number of tokens that the drafter can draft: those most frequent in the training set's text columns, then
            those of the run's own answers. Smaller makes every draft step and the drafter's training cheaper; tokens
            outside it are never drafted. Fixed for the drafter's life, so it does not go with
            `drafter_model_name_or_path`. `None` means a quarter of the policy's vocabulary, but 8192 tokens at least
            where it has as many.
        drafter_training (`bool`, *optional*, defaults to `True`):
            Whether to train the drafter during the run. Without it acceptance decays as the policy moves away from the
            one the drafter was trained for.
        drafter_time_budget (`float`, *optional*, defaults to `0.1`):
            Largest share of a step to spend on training the drafter outside of waits. How much of it is spent follows
            from what speculation saves: at most half of that, and a hundredth of the step while the drafter learns.
            With `speculation_selector='fixed'` savings are not measured; one process then spends the whole share. 0
            trains in waiting time only, which a single process does not have.
        drafter_learning_rate (`float`, *optional*, defaults to `0.0005`):
            Learning rate of the drafter's own AdamW. Too low and it cannot follow the policy.
        drafter_push_to_hub (`bool`, *optional*, defaults to `False`):
            Whether to push the drafter to the Hub at the end of training and, as `hub_strategy` says, at every save,
            in the background. `hub_token`, `hub_private_repo`, `hub_revision` and `hub_always_push` apply. A push that
            fails is reported and does not stop training.
        drafter_hub_model_id (`str`, *optional*):
            Repository of the drafter, apart from the policy's because engines load a drafter by its repository. `None`
            means `hub_model_id` (or the name of `output_dir`) with `-drafter` added.
        drafter_background_training (`bool`, *optional*):
            Whether one process trains its drafter in a thread while reward functions, tools and environments run. Free
            where they leave the accelerator alone; on CPU they compete for the cores, and Python code competes for the
            interpreter lock. `None`: on where the accelerator is not the CPU and no reward function is a model. With
            several processes it is off: ranks merge their drafters right after the rollout.

        > Parameters that control the feature buffer

        feature_buffer_tokens (`int`, *optional*, defaults to `65536`):
            Capacity in tokens of the buffer of hidden states that the drafter trains on. One token takes 8 bytes x
            hidden size of CPU memory.

        > Parameters that control logging

        log_timeline (`bool`, *optional*, defaults to `False`):
            Whether every rank writes what it did when to `<output_dir>/timeline/rank_<n>.jsonl`, for `tlt-trl
            timeline`. Costs some fifteen lines a step.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["vllm_engine_kwargs"]

    # Parameters that control speculative rollouts
    speculation_selector: str = field(
        default="auto",
        metadata={
            "help": "How the strategy of every engine step is chosen. `'fixed'`: always the same. `'beg_mab'`: "
            "bucketed epsilon-greedy bandit of [TLT](https://huggingface.co/papers/2511.16665). `'cost_model'`: "
            "fitted step-time model as in [RLHFSpec](https://huggingface.co/papers/2512.04752). `'auto'`: the cost "
            "model as prior, corrected by a bandit. The adaptive ones spend a few steps per rollout on trying "
            "alternatives and turn speculation off where it does not pay; `'fixed'` never explores and can lose at "
            "large batches."
        },
    )
    speculation_strategies: list[str] | None = field(
        default=None,
        metadata={
            "help": "Strategies to choose from: a method and a number of draft tokens, such as `'eagle3 x3'` (the "
            "drafter), `'eagle3 x3 probabilistic'` (draft tokens sampled, not the best ones; slower to draft, and "
            "accepted more often where the drafter knows the policy's distribution well) or `'ngram x4'` (tokens "
            "looked up in earlier answers to the same prompt; needs synchronous scheduling). All are lossless. "
            "Decoding without drafts is always a choice; each further one costs some exploration, and the longest "
            "sizes the engine's buffers and the drafter's training. `None` means `['eagle3 x1', 'eagle3 x2', "
            "'eagle3 x3', 'eagle3 x5', 'ngram x4']`, and `['eagle3 x3']` with `speculation_selector='fixed'`, which "
            "takes exactly one."
        },
    )
    speculation_activation_threshold: int | None = field(
        default=None,
        metadata={
            "help": "Largest number of running requests at which speculation is on (TLT uses 32); only with "
            "`speculation_selector='fixed'`. `None` keeps it on always."
        },
    )
    speculation_on_unsupported: str = field(
        default="disable",
        metadata={
            "help": "What to do where a run cannot speculate and stay exact: a sampling parameter such as `min_p`, a "
            "policy that is quantised or of a class that vLLM cannot draft for, an engine that fails the check at "
            "start-up. `'disable'` goes on as plain TRL does, without drafter, and says once why; `'error'` stops."
        },
    )

    # Parameters that control the engine
    vllm_engine_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Further keyword arguments for `vllm.LLM`, such as `{'max_num_seqs': 64}`. They override those "
            "that TRL passes, but may not hold `disable_log_stats`. A `speculative_config` among them adds to the "
            "trainer's own, such as `{'disable_eagle_block_drop': True}`; keys that the trainer sets are an error."
        },
    )
    vllm_verify_weight_sync: bool = field(
        default=True,
        metadata={
            "help": "Whether to read weights back from the engine after every sync and compare them with what was "
            "pushed. Costs about one pass over the weights; catches a stale or half-loaded engine, which would train "
            "on another policy's samples. Each rank of a tensor-parallel engine compares its slices."
        },
    )

    # Parameters that control sample reallocation
    sample_reallocation: str = field(
        default="off",
        metadata={
            "help": "Whether a rank that has finished its rollout takes over unfinished samples of others: `'off'`, "
            "`'prefill'` (the text is sent and read again as a prompt), or `'auto'` (the same where it can be used: "
            "several engines, each of one process, that do not sleep, trained drafters, and neither tools, "
            "environments nor a `rollout_func`). The distribution of the samples stays the policy's."
        },
    )

    # Parameters that control the drafter
    drafter_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Folder or Hub id of an EAGLE-3 drafter to start from. `None` initialises one from the policy: "
            "its tokens are rejected until it has trained on some ten thousand tokens."
        },
    )
    drafter_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Number of tokens that the drafter can draft: those most frequent in the training set's text "
            "columns, then those of the run's own answers. Smaller makes every draft step and the drafter's training "
            "cheaper; tokens outside it are never drafted. Fixed for the drafter's life, so it does not go with "
            "`drafter_model_name_or_path`. `None` means a quarter of the policy's vocabulary, but 8192 tokens at "
            "least where it has as many."
        },
    )
    drafter_training: bool = field(
        default=True,
        metadata={
            "help": "Whether to train the drafter during the run. Without it acceptance decays as the policy moves "
            "away from the one the drafter was trained for."
        },
    )
    drafter_time_budget: float = field(
        default=0.1,
        metadata={
            "help": "Largest share of a step to spend on training the drafter outside of waits. How much of it is "
            "spent follows from what speculation saves: at most half of that, and a hundredth of the step while the "
            "drafter learns. With `speculation_selector='fixed'` savings are not measured; one process then spends "
            "the whole share. 0 trains in waiting time only, which a single process does not have."
        },
    )
    drafter_learning_rate: float = field(
        default=5e-4,
        metadata={"help": "Learning rate of the drafter's own AdamW. Too low and it cannot follow the policy."},
    )
    drafter_push_to_hub: bool = field(
        default=False,
        metadata={
            "help": "Whether to push the drafter to the Hub at the end of training and, as `hub_strategy` says, at "
            "every save, in the background. `hub_token`, `hub_private_repo`, `hub_revision` and `hub_always_push` "
            "apply. A push that fails is reported and does not stop training."
        },
    )
    drafter_hub_model_id: str | None = field(
        default=None,
        metadata={
            "help": "Repository of the drafter, apart from the policy's because engines load a drafter by its "
            "repository. `None` means `hub_model_id` (or the name of `output_dir`) with `-drafter` added."
        },
    )
    drafter_background_training: bool | None = field(
        default=None,
        metadata={
            "help": "Whether one process trains its drafter in a thread while reward functions, tools and "
            "environments run. Free where they leave the accelerator alone; on CPU they compete for the cores, and "
            "Python code competes for the interpreter lock. `None`: on where the accelerator is not the CPU and no "
            "reward function is a model. With several processes it is off: ranks merge their drafters right after "
            "the rollout."
        },
    )

    # Parameters that control the feature buffer
    feature_buffer_tokens: int = field(
        default=65536,
        metadata={
            "help": "Capacity in tokens of the buffer of hidden states that the drafter trains on. One token takes 8 "
            "bytes x hidden size of CPU memory."
        },
    )

    # Parameters that control logging
    log_timeline: bool = field(
        default=False,
        metadata={
            "help": "Whether every rank writes what it did when to `<output_dir>/timeline/rank_<n>.jsonl`, for "
            "`tlt-trl timeline`. Costs some fifteen lines a step."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_choice("speculation_selector", SELECTORS)
        self._check_choice("speculation_on_unsupported", ON_UNSUPPORTED)
        self._check_choice("sample_reallocation", SAMPLE_REALLOCATION)
        self._check_strategies()
        self._check_engine_kwargs()
        self._check_range("drafter_time_budget", 0.0, 0.9)
        if not self.drafter_learning_rate > 0:
            raise ValueError(f"`drafter_learning_rate` must be greater than 0, got {self.drafter_learning_rate}.")
        self._check_range("feature_buffer_tokens", 1)
        if self.drafter_vocab_size is not None:
            self._check_range("drafter_vocab_size", 1)
        if self.speculation_activation_threshold is not None:
            self._check_range("speculation_activation_threshold", 0)
        self._check_effects()

    def _check_engine_kwargs(self) -> None:
        kwargs = cast(dict, self.vllm_engine_kwargs or {})
        if "disable_log_stats" in kwargs:
            raise ValueError(
                "`vllm_engine_kwargs` must not hold `disable_log_stats`: the trainer sets it, for without statistics "
                "the engine counts no drafts."
            )
        for name in kwargs.get("speculative_config") or {}:
            if name in OWN_SPECULATIVE_KEYS:
                raise ValueError(
                    f"`vllm_engine_kwargs['speculative_config']` must not hold `{name}`: {OWN_SPECULATIVE_KEYS[name]}."
                )

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if self.__dict__[name] not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {self.__dict__[name]!r}.")

    def _check_range(self, name: str, low: float, high: float | None = None) -> None:
        value = self.__dict__[name]
        if not low <= value or (high is not None and value > high):
            upper = "" if high is None else f" and at most {high}"
            raise ValueError(f"`{name}` must be at least {low}{upper}, got {value}.")

    def _check_strategies(self) -> None:
        texts = self.speculation_strategies
        if texts is not None and (isinstance(texts, str) or not texts):
            raise ValueError(
                "`speculation_strategies` must be a list such as ['eagle3 x1', 'eagle3 x3', 'ngram x4'], "
                f"got {texts!r}."
            )
        try:
            strategies = check_strategies(self.strategies)
        except ValueError as error:
            raise ValueError(f"`speculation_strategies`: {error}") from error
        for strategy in strategies:
            if strategy.is_off:
                raise ValueError(
                    "`speculation_strategies` must not hold 'off': the adaptive selectors always have it among their "
                    "choices, and `speculation_activation_threshold=0` turns 'fixed' off."
                )
            if strategy.num_draft_tokens > MAX_DRAFT_TOKENS:
                raise ValueError(
                    f"`speculation_strategies` holds '{strategy}'; use at most {MAX_DRAFT_TOKENS} draft tokens."
                )
        if self.max_drafter_tokens == 0:
            raise ValueError(
                f"`speculation_strategies` is {texts}, in which nothing uses the drafter; add one such as 'eagle3 x3'."
            )
        if self.speculation_selector == "fixed" and len(strategies) > 1:
            raise ValueError(
                f"`speculation_strategies` holds {len(strategies)} strategies, of which "
                "`speculation_selector='fixed'` uses one: name that one, or let `speculation_selector='auto'` choose."
            )

    def _check_effects(self) -> None:
        """Refuses values that nothing would read."""
        if self.speculation_selector != "fixed":
            self._check_unset(
                "speculation_activation_threshold",
                f"`speculation_selector='{self.speculation_selector}'`",
                "leave it out (the adaptive selectors find out where speculation pays), or use 'fixed'",
            )
        if self.drafter_model_name_or_path is not None:
            self._check_unset(
                "drafter_vocab_size",
                f"`drafter_model_name_or_path={self.drafter_model_name_or_path!r}`",
                "leave it out: the drafter brings its vocabulary",
            )
        if not self.drafter_training:
            for name in DRAFTER_TRAINING_FIELDS:
                self._check_unset(name, "`drafter_training=False`", "leave it out")

    def _check_unset(self, name: str, other: str, remedy: str) -> None:
        if self.__dict__[name] != self.__dataclass_fields__[name].default:
            raise ValueError(f"`{name}` has no effect with {other}; {remedy}.")

    @property
    def strategies(self) -> list[Strategy]:
        """What the selector chooses from, besides decoding without drafts."""
        default = DEFAULT_FIXED_STRATEGIES if self.speculation_selector == "fixed" else DEFAULT_STRATEGIES
        texts = default if self.speculation_strategies is None else self.speculation_strategies
        return [Strategy.parse(text) for text in texts]

    @property
    def max_draft_tokens(self) -> int:
        """Largest number of draft tokens that any strategy of this run proposes."""
        return max(strategy.num_draft_tokens for strategy in self.strategies)

    @property
    def max_drafter_tokens(self) -> int:
        """Largest number of draft tokens that the drafter proposes in this run."""
        lengths = [strategy.num_draft_tokens for strategy in self.strategies if strategy.method == "eagle3"]
        return max(lengths, default=0)

    @property
    def repeats_seeds(self) -> bool:
        """Whether a seed gives the same tokens again: every step drafts equally many tokens, greedily."""
        return (
            self.speculation_selector == "fixed"
            and self.speculation_activation_threshold is None
            and all(strategy.draft_sampling == "greedy" for strategy in self.strategies)
        )

    @classmethod
    def from_grpo_config(cls, config: GRPOConfig) -> "TLTGRPOConfig":
        """
        Copies the values of a [`~trl.GRPOConfig`] and adds the defaults of this class.

        The trainer works on the copy: changing the original afterwards has no effect, and methods of a subclass of
        `GRPOConfig` are not taken over.
        """
        if isinstance(config, cls):
            return config
        new = cls.__new__(cls)
        new.__dict__.update(config.__dict__)
        for spec in fields(cls):
            if spec.name not in new.__dict__:
                value = spec.default if spec.default_factory is MISSING else spec.default_factory()
                new.__dict__[spec.name] = value
        return new
