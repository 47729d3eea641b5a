"""Several members behind one address. Here is what decides: pure, standard library only, time handed in.

Reading order: `names` (what a router calls blocks), `index` (who holds which), `load` (who has how much to compute),
`membership` (who is there, and may get work), `choice` (who gets a request), `checks` (that all of these agree).

Whatever is believed here about a member's cache may be wrong. That costs a prefill, never a wrong answer: members look
for themselves.
"""
