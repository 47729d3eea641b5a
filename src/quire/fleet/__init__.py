"""Several members behind one address. This is the routing: pure, standard library only, time is a parameter.

Reading order in `routing`: `block_names`, `block_index` (which member holds which block), `member_load` (how much each
has to compute), `membership` (which members there are), `router` (which gets a request), `invariants` (all agree).

What a router expects of a member's cache may be wrong. That costs a prefill, never a wrong response: members check
their own cache.
"""
