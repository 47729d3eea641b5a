"""Random repositories and memory sizes: the selected variant, compared with an exhaustive search by the rule that
`quire.checkpoints.hub.variants` documents.
"""

from itertools import permutations
from random import Random

from benchmarks.record import say
from proofs.framework.proof import Proof, section
from quire.checkpoints.hub.variants import (
    BITS,
    SAFETENSORS,
    WIDENED_BITS,
    HubFile,
    Variant,
    judge_variants,
    variants_of,
)

GB = 10**9
GIB = 1 << 30


@section("which file fits")
def fit(proof: Proof) -> None:
    """Random repositories with twenty memory sizes each."""
    num_wrong = num_taken = 0
    count = proof.sized(quick=60, full=600)
    for _ in range(count):
        variants = variants_of(random_repository(proof.random))
        for _ in range(20):
            memory_bytes = int(proof.random.uniform(0.5, 64) * GIB)
            selected = [one.variant for one in judge_variants(variants, memory_bytes) if one.is_selected]
            expected = best_variant(variants, memory_bytes)
            num_taken += bool(selected)
            if selected != ([] if expected is None else [expected]):
                num_wrong += 1
                say(f"    {[(one.label, one.size_bytes) for one in variants]}, {memory_bytes}: {selected}, {expected}")
    proof.at_least("fit_taken", num_taken, count * 5, "otherwise too few variants were selected")
    proof.equals("fit_wrong", num_wrong, 0, f"of {count} repositories with 20 memories each")


def random_repository(random: Random) -> list[HubFile]:
    """Return files of a random repository, named and split as published ones are."""
    num_weights = random.uniform(0.1, 70) * GB
    files = [HubFile("README.md", 1000), HubFile("config.json", 1000), HubFile("mmproj-F16.gguf", GB)]
    for label in random.sample([*BITS, *WIDENED_BITS, "IQ9_X"], random.randint(0, 12)):
        size = int(num_weights * (BITS | WIDENED_BITS).get(label, 1.7) / 8 * random.uniform(0.95, 1.05))
        name = random.choice((f"Some-Model-{label}", f"some.model.{label.lower()}", f"{label}/some-model"))
        count = random.choice((1, 1, 1, 2, 3))
        is_missing = count > 1 and random.random() < 0.2
        for number in range(1, count + 1 - is_missing):
            part = "" if count == 1 else f"-{number:05}-of-{count:05}"
            files.append(HubFile(f"{name}{part}.gguf", size // count))
    if random.random() < 0.5:
        files.append(HubFile("model.safetensors", int(num_weights * 2)))
    random.shuffle(files)
    return files


def best_variant(variants: list[Variant], memory_bytes: int) -> Variant | None:
    """Return the fitting variant that no other one beats, by comparing all pairs."""
    fitting = [one for one in variants if one.bits is not None and needed_bytes(one) <= memory_bytes]
    beaten = {id(worse) for better, worse in permutations(fitting, 2) if beats(better, worse)}
    unbeaten = [one for one in fitting if id(one) not in beaten]
    return unbeaten[0] if unbeaten else None


def needed_bytes(variant: Variant) -> int:
    weights = sum(file.size_bytes for file in variant.files if file.name.endswith((".gguf", ".safetensors")))
    bits = WIDENED_BITS.get(variant.label.upper())
    num_bytes = weights if bits is None else weights * (8.5 / bits)
    return int(num_bytes * 1.15) + int(0.4 * GIB) + int(0.5 * GIB)


def beats(a: Variant, b: Variant) -> bool:
    """Whether the rule prefers variant `a` to variant `b`."""
    if (a.label == SAFETENSORS) != (b.label == SAFETENSORS):
        return b.label == SAFETENSORS
    a_bits, b_bits = a.bits or 0.0, b.bits or 0.0
    if (a_bits > 8.6) != (b_bits > 8.6):
        return b_bits > 8.6
    if a_bits != b_bits:
        return a_bits < b_bits if a_bits > 8.6 else a_bits > b_bits
    return (a.size_bytes, a.first_name) < (b.size_bytes, b.first_name)
