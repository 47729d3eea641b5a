"""Two agents share a system prompt's blocks; a third agent's prompt differs in one token.

No model is involved: the KV memory only decides which blocks hold which tokens; a runner would fill the blocks.
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
    num_reused = memory.match(table, tokens)  # finds the cached blocks and adds references to them
    memory.reserve(table, tokens, len(tokens) - num_reused)  # blocks for tokens that a runner would compute
    memory.commit(table, len(tokens) - num_reused)  # from now on, prompts can hit the full blocks
    print(f"{agent}: {num_reused} of {len(tokens)} tokens reused, blocks {table.blocks}")

changed_prompt = [*system_prompt[:40], 77, *system_prompt[41:], *[3] * 9]
miss = memory.divergence(namespace, changed_prompt)
print(
    f"agent 3: {miss.num_cached_tokens} of {len(changed_prompt)} tokens reused; "
    f"the next block: {miss.reason.value} at token {miss.first_different_token}"
)
