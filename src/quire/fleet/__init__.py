"""Several members (workers with network addresses) behind one gateway, with cache-aware routing.

`routing` is pure logic: standard library only, and the current time is a parameter. Reading order: `block_names`,
`block_index` (which member holds which block), `member_load` (uncomputed tokens of each member), `membership` (member
states), `router` (chooses the member for a request).

The router's view of a member's cache may be wrong. A wrong view costs a prefill, never a wrong response, because
members check their own cache.
"""
