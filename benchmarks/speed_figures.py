"""Generates the table of docs/concepts/speed.md from the record of the full proof.

`python -m benchmarks.speed_figures` writes it between its two marks; a test checks that it is current.
"""

import json
import sys
from typing import Any

from benchmarks.cpu_figures import missed
from benchmarks.record import PROOF_RESULTS, ROOT, wrapped

PAGE = ROOT / "docs" / "concepts" / "speed.md"
BEGIN, END = "<!-- figures: python -m benchmarks.speed_figures -->", "<!-- end of figures -->"

ROWS = (
    ("roof_1_288", "roof / step, 1 sequence, context 288", "0.80"),
    ("roof_4_288", "roof / step, 4 sequences, context 288", "0.80"),
    ("roof_16_288", "roof / step, 16 sequences, context 288", "0.80"),
    ("roof_32_288", "roof / step, 32 sequences, context 288", "0.80"),
    ("roof_16_1024", "roof / step, 16 sequences, context 1,024", "0.80"),
    ("roof_64_1024", "roof / step, 64 sequences, context 1,024", "0.80"),
    ("bare_16_288", "bare products / step, 16 sequences, context 288", "0.68"),
    ("prefill_512", "bare products / step of 512 prompt tokens", "0.80"),
    ("prefill_512_past_512", "the same after 512 other tokens", "0.62"),
    ("speedup_16_vs_1", "tokens/s of 16 requests at once / one at a time", "6"),
    ("kv_bf16_speedup", "step with KV in fp32 / in bf16, 32 sequences, context 1,024", "1.25"),
    ("bf16_speedup_1_288", "step in fp32 / with weights and KV in bf16, 1 sequence, context 288", "reported"),
    ("bf16_speedup_16_288", "the same, 16 sequences", "reported"),
    ("bf16_speedup_64_1024", "the same, 64 sequences, context 1,024", "reported"),
    ("bf16_speedup_prefill_512", "the same, a step of 512 prompt tokens", "reported"),
)


def table(record: dict[str, Any]) -> str:
    """Return the figures as Markdown, with their date and machine."""
    figures = record["figures"]
    lines = ["| | at least | measured | spread |", "|---|---|---|---|"]
    lines += [
        f"| {text} | {bound} | {figures[key]:.2f}{missed(record, key)} | {figures[f'{key}_spread']:.2f} |"
        for key, text, bound in ROWS
    ]
    bf16, change = figures["perplexity_kv_bf16"], figures["perplexity_change"]
    machine = record["machine"]
    prose = (
        f"Full run of {record['date']} on {machine['cores']} cores ({machine['processor']}), SmolLM2-135M in float32: "
        f"medians, and the interquartile range of single rounds. KV in bf16 changes the perplexity of a fixed text of "
        f"{figures['perplexity_tokens']:,} tokens by {change:+.2%}, to {bf16:.3f}; weights and KV in bf16 by "
        f"{figures['perplexity_change_bf16']:+.2%}. "
        "Everything: [results/proof-native.json](../../proofs/results/proof-native.json)."
    )
    return "\n".join([*lines, "", *wrapped(prose)])


def with_table(page: str, record: dict[str, Any]) -> str:
    """Return the page with a new table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(record)}\n\n{END}{after}"


def read_record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((PROOF_RESULTS / "proof-native.json").read_text())
    return record


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), read_record()))
    sys.exit(0)
