"""Made-up repositories and memories: what is taken, beside a search through everything under the rule that stands in
`quire.checkpoints.hub.variants`.
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
    """Sixty repositories, twenty memories each."""
    num_wrong = num_taken = 0
    count = proof.sized(quick=60, full=600)
    for _ in range(count):
        variants = variants_of(made_up(proof.random))
        for _ in range(20):
            memory_bytes = int(proof.random.uniform(0.5, 64) * GIB)
            taken = [one.variant for one in judge_variants(variants, memory_bytes) if one.is_selected]
            expected = searched(variants, memory_bytes)
            num_taken += bool(taken)
            if taken != ([] if expected is None else [expected]):
                num_wrong += 1
                say(f"    {[(one.label, one.size_bytes) for one in variants]}, {memory_bytes}: {taken}, {expected}")
    proof.at_least("fit_taken", num_taken, count * 5, "else little was chosen")
    proof.equals("fit_wrong", num_wrong, 0, f"of {count} repositories with 20 memories each")


def made_up(random: Random) -> list[HubFile]:
    """Files as people name and cut them."""
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


def searched(variants: list[Variant], memory_bytes: int) -> Variant | None:
    """The one that no other beats, found by asking each pair."""
    fitting = [one for one in variants if one.bits is not None and needed(one) <= memory_bytes]
    beaten = {id(worse) for better, worse in permutations(fitting, 2) if beats(better, worse)}
    left = [one for one in fitting if id(one) not in beaten]
    return left[0] if left else None


def needed(variant: Variant) -> int:
    weights = sum(file.size_bytes for file in variant.files if file.name.endswith((".gguf", ".safetensors")))
    bits = WIDENED_BITS.get(variant.label.upper())
    held = weights if bits is None else weights * (8.5 / bits)
    return int(held * 1.15) + int(0.4 * GIB) + int(0.5 * GIB)


def beats(one: Variant, other: Variant) -> bool:
    """By the rule, line by line."""
    if (one.label == SAFETENSORS) != (other.label == SAFETENSORS):
        return other.label == SAFETENSORS
    mine, its = one.bits or 0.0, other.bits or 0.0
    if (mine > 8.6) != (its > 8.6):
        return its > 8.6
    if mine != its:
        return mine < its if mine > 8.6 else mine > its
    return (one.size_bytes, one.first_name) < (other.size_bytes, other.first_name)
