"""Names of fields that other servers and official SDKs know. They are never taken for misspellings.

The names are from the documentation of these APIs in 2026, plus older names that clients still send. Some are read by
one dialect, and listed here because clients also send them to the others.
"""

from collections.abc import Mapping


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FOREIGN_FIELDS: Mapping[str, frozenset[str]] = {
    "OpenAI": _words(
        """
        access_programs audio background best_of frequency_penalty input instructions logit_bias logprobs max_tokens
        messages model n parallel_tool_calls presence_penalty prompt response_format seed service_tier stop stream
        temperature text tool_choice tools top_logprobs top_p context_management conversation function_call functions
        image include include_obfuscation max_completion_tokens max_output_tokens max_tool_calls metadata modalities
        moderation prediction previous_response_id prompt_cache_key prompt_cache_options prompt_cache_retention
        reasoning reasoning_effort safety_identifier store stream_options suffix truncation user verbosity
        web_search_options allowed_callers async context defer_loading generate_summary mode output_schema summary
        """
    ),
    "Anthropic": _words(
        """
        anthropic_version betas billing_policy cache_control compaction container context_management diagnostics
        fallback_credit_token fallbacks inference_geo mcp_servers metadata output_config output_format service_tier
        speed stop_sequences system thinking thread user_profile_id workspace_id
        allowed_callers block_binding clear_at defer_loading display eager_input_streaming effort input_examples
        task_budget
        """
    ),
    "vLLM": _words(
        """
        allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs documents early_stopping echo
        ec_transfer_params enable_response_messages guided_choice guided_decoding_backend guided_grammar guided_json
        guided_regex guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output
        kv_transfer_params length_penalty logits_processors logprob_token_ids media_io_kwargs min_tokens
        mm_processor_kwargs previous_input_messages priority prompt_embeds prompt_logprobs repetition_detection
        repetition_penalty request_id return_assistant_tokens_mask return_prompt_text return_token_ids
        return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens
        spaces_between_special_tokens stop_token_ids stream_interval structural_tag structured_outputs
        thinking_token_budget top_k min_p truncate_prompt_tokens truncation_side use_beam_search vllm_xargs
        disable_additional_properties disable_any_whitespace disable_fallback whitespace_pattern
        """
    ),
    "llama.cpp": _words(
        """
        adaptive_decay adaptive_target add_special backend_sampling cache_prompt chat_format chat_parser
        dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
        dynatemp_range enable_thinking generation_prompt grammar_lazy grammar_triggers grammar_type id_slot image_data
        input_extra input_prefix input_suffix json_schema lora message_delimiters min_keep mirostat mirostat_eta
        mirostat_tau n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs oaicompat parse_special
        parse_tool_calls penalize_nl post_sampling_probs preserved_tokens reasoning_budget reasoning_budget_end_tag
        reasoning_budget_end_tags reasoning_budget_message reasoning_budget_start_tag reasoning_budget_tokens
        reasoning_control reasoning_format repeat_last_n repeat_penalty resp_type response_fields return_progress
        return_tokens samplers slot_id sse_ping_interval system_prompt t_max_predict_ms t_max_prompt_ms
        thinking_budget_tokens thinking_forced_open timings_per_token top_n_sigma typical_p verbose with_pieces
        xtc_probability xtc_threshold
        """
    ),
    "Ollama": _words(
        """
        _debug_render_only context draft_num_predict format images keep_alive low_vram main_gpu mirostat mirostat_eta
        mirostat_tau num_batch num_ctx num_gpu num_gqa num_keep num_predict num_thread numa options penalize_newline
        raw repeat_last_n repeat_penalty shift system template tfs_z think truncate typical_p use_mlock use_mmap
        vocab_only seed top_k top_p min_p temperature stop frequency_penalty presence_penalty
        """
    ),
    "OpenRouter": _words(
        """
        cache_control debug enabled exclude fallbacks image_config include_reasoning max_price modalities models
        plugins preset provider reasoning route session_id speed stop_server_tools_when structured_outputs top_a
        trace transforms usage verbosity web_search_options
        """
    ),
}
ALL_FOREIGN = frozenset().union(*FOREIGN_FIELDS.values())
