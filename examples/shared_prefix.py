"""Two agents share a system prompt's blocks; a third one differs in one word, and prints why it missed.

No model is involved: the memory decides which blocks hold what, and a runner would fill them.
"""

from quire.core.digests import BlockHasher, Namespace
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory

namespace = Namespace(
    format_version=1, model="demo", adapter="", kv_layout="demo", block_size=32, cache_group="my-team"
)
memory = KVMemory(KVMemoryConfig(num_blocks=64), BlockHasher(key=bytes(32)))

system_prompt = list(range(1000, 1064))  # 64 tokens: two full blocks
questions = {"agent 1": [1] * 9, "agent 2": [2] * 10}

for agent, question in questions.items():
    tokens = system_prompt + question
    table = memory.open(namespace)
    reused = memory.match(table, tokens)  # finds the cached blocks and holds them
    memory.reserve(table, tokens, len(tokens) - reused)  # blocks for the rest; a runner would now compute it
    memory.commit(table, len(tokens) - reused)  # it has: full blocks can be hit from here on
    print(f"{agent}: {reused} of {len(tokens)} tokens reused, blocks {table.blocks}")

changed = [*system_prompt[:40], 77, *system_prompt[41:], *[3] * 9]
miss = memory.divergence(namespace, changed)
print(
    f"agent 3: {miss.num_cached_tokens} of {len(changed)} tokens reused; "
    f"the next block: {miss.reason.value} at token {miss.first_different_token}"
)
