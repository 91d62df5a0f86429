"""The fields of requests: which the server honours, which it refuses, and which change nothing.

They stand in one table. It has every field known of llama.cpp's server, vLLM, SGLang, TGI and
OpenAI, for every route that answers. So no field that would change an answer is ignored. A field
outside the table has no effect: clients send extras. README.md lists the table for readers.
"""

from __future__ import annotations

from typing import NamedTuple

from workbench.server.api import shapes as s
from workbench.server.api.schema import Schema

COMPLETIONS, CHAT, NATIVE = "/v1/completions", "/v1/chat/completions", "/completion"
TEMPLATE, TOKENIZE, DETOKENIZE = "/apply-template", "/tokenize", "/detokenize"
ANSWERS = (COMPLETIONS, CHAT, NATIVE)
OPENAI = (COMPLETIONS, CHAT)
PLAIN = (COMPLETIONS, NATIVE)  # no template stands between the request and the prompt
CHATS = (CHAT, TEMPLATE)

HONOURED, REFUSED, WITHOUT_EFFECT = "honoured", "refused", "without effect"
OFF = s.one_of(False)
NO_TOOLS = s.one_of("none", "auto")


class Field(NamedTuple):
    """Fields that are treated alike.

    names: with spaces between.
    schema: the values that are allowed; of a refused field, the values that ask for nothing.
    asks: what any other value asks for.
    instead: what a client can do about it.
    """

    names: str
    treatment: str
    schema: Schema = {}  # noqa: RUF012 - read only
    routes: tuple[str, ...] = ANSWERS
    asks: str = ""
    instead: str = "leave it out"

    @property
    def checked(self) -> Schema:
        """The schema, with the message for a value that it does not allow."""
        if self.treatment == WITHOUT_EFFECT:
            return {"description": WITHOUT_EFFECT}
        if self.treatment == HONOURED:
            return self.schema
        said = f"asks for {self.asks}, which is not supported; {self.instead}"
        return self.schema | {"description": said, "x-refusal": said}


# what a request's `chat_template_kwargs` cannot set: the server does
OURS = ("messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents")
_OF_TEMPLATE: Schema = {
    "type": ["object", "null"],
    "properties": dict.fromkeys(
        OURS, s.NULL | {"x-refusal": "cannot be set here; the server sets it"}
    ),
}

HONOURS = [
    Field("prompt", HONOURED, s.PROMPTS, (COMPLETIONS,)),
    Field("prompt", HONOURED, s.PROMPT, (NATIVE,)),
    Field("messages", HONOURED, s.MESSAGES, CHATS),
    Field("model", HONOURED, s.WORD),
    Field("temperature", HONOURED, s.number("number", 0, 100)),
    Field("top_p", HONOURED, {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1}),
    Field("top_k", HONOURED, s.number("integer", -1, s.INT32)),
    Field("min_p", HONOURED, s.number("number", 0, 1)),
    Field("seed", HONOURED, s.number("integer", -(2**63), 2**64 - 1)),
    Field("max_tokens max_completion_tokens n_predict", HONOURED, s.N_TOKENS),
    Field("n", HONOURED, s.number("integer", 1, s.MAX_CHOICES), OPENAI),
    Field("stop", HONOURED, s.STOP),
    Field("stop_token_ids", HONOURED, s.STOP_IDS),
    Field("ignore_eos stream cache_prompt", HONOURED, s.FLAG),
    Field("timeout", HONOURED, {
        "type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 86400}),
    Field("stream_options", HONOURED, {
        "type": ["object", "null"], "properties": {"include_usage": s.FLAG}}, OPENAI),
    Field("logprobs", HONOURED, s.number("integer", 0, s.MAX_LOGPROBS), (COMPLETIONS,)),
    Field("echo", HONOURED, s.FLAG, (COMPLETIONS,)),
    Field("logprobs", HONOURED, s.FLAG, (CHAT,)),
    Field("top_logprobs", HONOURED, s.number("integer", 0, s.MAX_LOGPROBS), (CHAT,)),
    Field("n_probs", HONOURED, s.number("integer", 0, s.MAX_LOGPROBS)),
    Field("add_special_tokens", HONOURED, s.FLAG, PLAIN),
    Field("add_special_tokens", HONOURED,
          OFF | {"x-refusal": "must be false here: a BOS is the template's"}, CHATS),
    Field("add_generation_prompt continue_final_message", HONOURED, s.FLAG, CHATS),
    Field("chat_template_kwargs", HONOURED, _OF_TEMPLATE, CHATS),
    Field("documents", HONOURED, s.OBJECTS, CHATS),
    Field("tools", HONOURED, s.OBJECTS, (TEMPLATE,)),
    Field("reasoning_effort", HONOURED, s.WORD, CHATS),
    Field("content", HONOURED, s.TEXT, (TOKENIZE,)),
    Field("add_special parse_special with_pieces", HONOURED, s.FLAG, (TOKENIZE,)),
    Field("tokens", HONOURED, s.IDS | {"minItems": 0}, (DETOKENIZE,)),
]  # fmt: skip

REFUSALS = [
    # sampling
    Field("presence_penalty frequency_penalty", REFUSED, s.one_of(0), asks="a penalty"),
    Field("repetition_penalty repeat_penalty", REFUSED, s.one_of(1), asks="a penalty"),
    Field("dry_multiplier", REFUSED, s.one_of(0), asks="a penalty"),
    Field("typical_p typ_p tfs_z", REFUSED, s.one_of(1), asks="a way to sample"),
    Field("dynatemp_range xtc_probability mirostat top_a smoothing_factor", REFUSED, s.one_of(0),
          asks="a way to sample"),
    Field("top_n_sigma", REFUSED, s.number("number", None, 0), asks="a way to sample"),
    Field("adaptive_target", REFUSED, s.one_of(-1), asks="a way to sample"),
    Field("min_keep", REFUSED, s.one_of(0, 1), asks="a least number of tokens to draw from"),
    Field("samplers", REFUSED, s.one_of(
        ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc",
         "temperature"],
        ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        ["top_k", "top_p", "temperature"], ["top_k", "top_p", "min_p", "temperature"],
    ), asks="samplers or an order of them"),
    Field("logit_bias bad_words allowed_token_ids logits_processors custom_logit_processor "
          "custom_params", REFUSED, s.NOTHING, asks="a bias of logits"),
    Field("use_beam_search", REFUSED, OFF, asks="a search by beams"),
    Field("do_sample", REFUSED, s.one_of(True), asks="the likeliest tokens",
          instead="send temperature=0"),
    Field("watermark", REFUSED, OFF, asks="a watermark"),
    Field("repetition_detection", REFUSED, s.NOTHING, asks="an end of repetitions"),
    Field("post_sampling_probs", REFUSED, OFF, asks="probabilities of what is drawn from"),
    # how long an answer is, and where it ends
    Field("min_tokens min_new_tokens", REFUSED, s.one_of(0), asks="a least length"),
    Field("max_new_tokens max_length num_predict", REFUSED, s.NULL,
          asks="a length by another name", instead="send max_tokens"),
    Field("stop_sequences stop_regex", REFUSED, s.NOTHING, asks="an end by another name",
          instead="send stop"),
    Field("include_stop_str_in_output no_stop_trim", REFUSED, OFF, asks="the stop text"),
    Field("n_indent", REFUSED, s.one_of(0), asks="an end at a line's indentation"),
    Field("t_max_predict_ms", REFUSED, s.number("number", None, 0), asks="a time by another name",
          instead="send timeout"),
    # forms of an answer
    Field("grammar json_schema grammar_triggers guided_json guided_regex guided_choice "
          "guided_grammar guided_decoding_backend guided_whitespace_pattern structured_outputs "
          "structural_tag regex ebnf", REFUSED, s.NOTHING, asks="an answer of a given form"),
    Field("grammar_lazy", REFUSED, OFF, asks="an answer of a given form"),
    Field("response_format", REFUSED, {
        "type": ["object", "null"], "properties": {"type": {"enum": ["text"]}}},
        asks="an answer of a given form"),
    Field("tools", REFUSED, s.NOTHING, asks="tools"),
    Field("functions", REFUSED, s.NOTHING, (*ANSWERS, TEMPLATE), "tools"),
    Field("tool_choice function_call", REFUSED, NO_TOOLS, asks="tools"),
    Field("tool_prompt guideline system_prompt", REFUSED, s.NOTHING,
          asks="a text before the prompt's", instead="say it in a message"),
    Field("web_search_options", REFUSED, s.NULL, asks="a search"),
    Field("modalities", REFUSED, s.one_of(["text"]), asks="more than text"),
    Field("audio image_data mm_processor_kwargs media_io_kwargs multimodal_data", REFUSED,
          s.NOTHING, asks="more than text"),
    Field("verbosity", REFUSED, s.one_of("medium"), asks="another verbosity",
          instead="say it in a message"),
    Field("skip_special_tokens", REFUSED, s.one_of(True), asks="names of special tokens"),
    Field("return_tokens_as_token_ids return_token_ids return_hidden_states "
          "decoder_input_details", REFUSED, OFF, asks="more than text and log-probabilities"),
    Field("response_fields", REFUSED, s.NOTHING, asks="a part of the answer"),
    Field("prompt_logprobs", REFUSED, s.NULL, asks="log-probabilities by another name",
          instead="send echo and logprobs to /v1/completions"),
    Field("top_n_tokens", REFUSED, s.one_of(0), asks="other tokens", instead="send n_probs"),
    Field("logprobs", REFUSED, s.one_of(0, False), (NATIVE,), "log-probabilities by another name",
          "send n_probs"),
    Field("top_logprobs", REFUSED, s.one_of(0), PLAIN, "log-probabilities by another name",
          "send n_probs"),
    Field("echo", REFUSED, OFF, (CHAT, NATIVE), "the prompt's text", "use /v1/completions"),
    Field("return_full_text", REFUSED, OFF, asks="the prompt's text by another name",
          instead="send echo to /v1/completions"),
    Field("best_of", REFUSED, s.one_of(1), asks="more than it answers"),
    Field("n", REFUSED, s.one_of(1), (NATIVE,), "several answers", "use /v1/completions"),
    Field("n_cmpl", REFUSED, s.one_of(1), asks="several answers", instead="use /v1/completions"),
    # reasoning
    Field("reasoning_effort", REFUSED, s.NULL, PLAIN, "reasoning, by no template",
          "use /v1/chat/completions"),
    Field("reasoning thinking think thinking_token_budget thinking_budget_tokens "
          "reasoning_budget", REFUSED, s.NOTHING, asks="a way to reason"),
    Field("enable_thinking", REFUSED, s.NULL, asks="a value of the template's",
          instead="send it in chat_template_kwargs"),
    Field("include_reasoning separate_reasoning stream_reasoning", REFUSED, s.one_of(True),
          asks="reasoning apart from the answer"),
    Field("reasoning_format", REFUSED, s.one_of("", "none", "auto"),
          asks="reasoning apart from the answer"),
    Field("thinking_forced_open", REFUSED, OFF, asks="an answer that begins with reasoning"),
    # the prompt
    Field("prompt", REFUSED, s.NOTHING, (CHAT,), "a prompt without a template",
          "use /v1/completions"),
    Field("messages", REFUSED, s.NOTHING, PLAIN, "a chat", "use /v1/chat/completions"),
    Field("inputs input_ids prompt_embeds parameters options", REFUSED, s.NOTHING,
          asks="a request in another engine's words", instead="send a prompt and its settings"),
    Field("suffix", REFUSED, s.NOTHING, asks="a text between two others"),
    Field("chat_template", REFUSED, s.NOTHING, (*ANSWERS, TEMPLATE), "another template",
          "give the server one with --chat-template-file"),
    Field("documents", REFUSED, s.NOTHING, PLAIN, "documents, by no template",
          "use /v1/chat/completions"),
    Field("truncate truncate_prompt_tokens", REFUSED, s.NULL, asks="a shorter prompt",
          instead="send one"),
    Field("truncation_side", REFUSED, s.NULL, asks="a shorter prompt", instead="send one"),
    Field("n_keep", REFUSED, s.one_of(0, -1), asks="a context that loses tokens"),
    Field("n_discard", REFUSED, s.one_of(0), asks="a context that loses tokens"),
    # which engine, and whose cells
    Field("lora lora_path adapter_id", REFUSED, s.NOTHING, asks="an adapter"),
    Field("id_slot slot_id", REFUSED, s.one_of(-1), asks="a slot of its own"),
    Field("cache_salt kv_transfer_params session_params vllm_xargs", REFUSED, s.NOTHING,
          asks="cells of its own"),
]  # fmt: skip

IDLE = [
    Field("stream_options", WITHOUT_EFFECT, routes=(NATIVE,)),
    Field("add_generation_prompt continue_final_message chat_template_kwargs", WITHOUT_EFFECT,
          routes=PLAIN),
    # of ways to sample that are refused where they are on
    Field("dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold "
          "mirostat_tau mirostat_eta dynatemp_exponent repeat_last_n penalize_nl penalty_prompt "
          "adaptive_decay smoothing_curve length_penalty early_stopping", WITHOUT_EFFECT),
    # of tools, which are refused
    Field("parallel_tool_calls parse_tool_calls", WITHOUT_EFFECT),
    # when and how an answer comes, not which
    Field("return_tokens timings_per_token return_progress verbose priority request_id rid "
          "spaces_between_special_tokens prediction backend_sampling n_cache_reuse keep_alive",
          WITHOUT_EFFECT),
    Field("speculative.n_max speculative.n_min speculative.p_min", WITHOUT_EFFECT),
    # who asks
    Field("user metadata store service_tier safety_identifier prompt_cache_key "
          "prompt_cache_retention", WITHOUT_EFFECT),
]  # fmt: skip

FIELDS = [*HONOURS, *REFUSALS, *IDLE]

_REQUIRED = {
    COMPLETIONS: "prompt", CHAT: "messages", NATIVE: "prompt", TOKENIZE: "content",
    DETOKENIZE: "tokens", TEMPLATE: "messages",
}  # fmt: skip


def _unless(field: str, nothing: Schema, other: Schema, words: str) -> dict[str, Schema]:
    """The schema of a whole body for `field`: the condition holds unless the field asks for
    nothing."""
    alone = {"properties": {field: nothing}}
    return {field: {"anyOf": [alone, other], "x-refusal": words}}


_TOP_LOGPROBS = _unless(
    "top_logprobs",
    s.one_of(0),
    {"properties": {"logprobs": {"enum": [True]}}, "required": ["logprobs"]},
    "needs logprobs=true; set it too",
)
_CONTINUED = _unless(
    "continue_final_message",
    OFF,
    {"properties": {"add_generation_prompt": OFF}},
    "cannot be, with add_generation_prompt=true; leave one of them out",
)
_BODIES: dict[str, dict[str, Schema]] = {CHAT: _TOP_LOGPROBS | _CONTINUED, TEMPLATE: _CONTINUED}


def _schema(route: str) -> Schema:
    fields = {
        name: field.checked
        for field in FIELDS
        if route in field.routes
        for name in field.names.split()
    }
    made = {"type": "object", "properties": fields, "required": [_REQUIRED[route]]}
    return made | ({"dependentSchemas": _BODIES[route]} if route in _BODIES else {})


SCHEMAS: dict[str, Schema] = {route: _schema(route) for route in _REQUIRED}
# route -> the fields that are honoured there
READ: dict[str, set[str]] = {
    route: {
        name
        for field in FIELDS
        if route in field.routes and field.treatment == HONOURED
        for name in field.names.split()
    }
    for route in _REQUIRED
}
