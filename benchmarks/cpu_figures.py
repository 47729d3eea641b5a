"""Tables of the CPU backend for the documents, from the record of its proof; unmeasured rows are left out."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.record import wrapped

SPEED = {
    "memory_speed_1b": "bytes of weights / (step x bandwidth), 1B in Q4_0, one sequence",
    "memory_speed_8b": "bytes of weights / (step x bandwidth), 8B in Q4_K, one sequence",
    "q4_over_float32_1": "tokens/s of SmolLM2's 4-bit file / in float32, one sequence",
    "q4_over_float32_16": "4-bit file / in float32, 16 sequences",
    "q4_over_float32_64": "4-bit file / in float32, 64 sequences",
    "bf16_over_float32_1": "tokens/s in bfloat16 / in float32, one sequence",
    "bf16_over_float32_16": "bfloat16 / float32, 16 sequences",
    "bf16_over_float32_64": "bfloat16 / float32, 64 sequences",
    "host_ms_1": "the host's part of a one-row step, ms",
    "neighbour_ratio": "tokens/s beside a busy program / alone, one sequence",
    "neighbour_ratio_two": "beside two busy programs / alone, one sequence",
    "llamacpp_1_coder": "tokens/s / llama.cpp's, Qwen2.5-Coder-1.5B in Q4_K_M, one sequence",
    "llamacpp_4_coder": "the coder / llama.cpp's, 4 sequences",
    "llamacpp_16_coder": "the coder / llama.cpp's, 16 sequences",
    "llamacpp_32_coder": "the coder / llama.cpp's, 32 sequences",
    "llamacpp_prefill_coder": "the coder / llama.cpp's, a prompt of 512",
}
EXACT = {
    "bitexact_pairs": "pairs of products, models and builds compared bit for bit",
    "bitexact_mismatches": "of them, not the same bits",
    "isa_pairs": "among them: integer products of this processor's builds against the portable one",
    "neon_pairs": "among them: ARM's under an emulator, and this machine's beside them",
    "format_error": "worst relative error of a product in float arithmetic, against float64",
    "perplexity_float": "change of perplexity, float arithmetic over float32 weights",
    "perplexity_int8": "change of perplexity, int8 arithmetic over float32 weights",
    "perplexity_kv8": "change of perplexity, keys and values in 8 bits",
}
HOLD = {
    "install_mb": "an environment with the wheel alone, MB",
    "torch_imports": "modules of torch that a server loads",
    "start_s": "SmolLM2's file to ready, s",
    "idle_gib": "held by that server, GiB",
    "disk_written": "bytes of weights written to disk for the 8B file",
    "memory_share_8b": "held for it, without 0.4 GiB, over its size",
    "load_s_8b": "to its first answer, files warm, s",
}


SETS = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "neondot")
SET_LOADS = {"prompt": "a prompt of 512", "1": "one stream", "4": "4 streams", "16": "16 streams"}


def sets_of(record: Mapping[str, Any]) -> list[list[str]]:
    """Return a column for each instruction set: tokens per second, and the ratio to llama.cpp's if measured."""
    figures = record["figures"]
    measured = [name for name in SETS if f"set_tokens_per_s_prompt_{name}" in figures]
    rows = [["tokens/s (times llama.cpp's)", *measured]] if measured else []
    for load, text in SET_LOADS.items() if measured else ():
        cells = []
        for name in measured:
            rate, ratio = figures.get(f"set_tokens_per_s_{load}_{name}"), figures.get(f"set_llamacpp_{load}_{name}")
            times = "" if ratio is None else f" ({ratio:.2f}{missed(record, f'set_llamacpp_{load}_{name}')})"
            cells.append("not measured" if rate is None else f"{rate:.1f}{times}")
        rows.append([text, *cells])
    return rows


def rows_of(record: Mapping[str, Any], texts: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return rows of text, bound and figure."""
    figures, bounds = record["figures"], record["bounds"]
    return [
        (text, bounds.get(key, "reported").partition(":")[0], _figure(figures[key]) + missed(record, key))
        for key, text in texts.items()
        if key in figures
    ]


def missed(record: Mapping[str, Any], key: str) -> str:
    """Return the text that a table adds to a figure beyond its bound."""
    return ", bound missed" if key in record.get("broken", ()) else ""


def circumstances_of(record: Mapping[str, Any]) -> Sequence[str]:
    """Return the date, commit, machine and instruction sets of a record as lines of Markdown."""
    machine = record["machine"]
    prose = (
        f"Run of {record['date']}, commit {record['commit'][:10]}, on {machine['cores']} cores "
        f"({machine['processor']}; {', '.join(machine['abilities'])}). Everything: "
        f"[results/proof-{record['proof']}.json](../../proofs/results/proof-{record['proof']}.json)."
    )
    return wrapped(prose)


def _figure(value: float) -> str:
    """Format a count with all digits, another number with six."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
