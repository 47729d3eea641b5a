"""The doors: HTTP in, valid requests on, events out. Locked by default, bounded everywhere, honest under load.

    protocol ─► entrance ─► auth ─► body ─► shapes ─► Front.ask ─► answers ─► sse or one JSON object
    bytes       ids, log    keys    JSON    pydantic                 pieces

Reading order: `limits`, `refusals`, `body`, `keys`, `quotas`, `auth`, `models`, `visits`, `doors`, `answering`, `sse`,
`openai/`, `entrance`, `app`, `admin`, `protocol`, `server`. May import engine, observe, core.request, errors, config;
never the scheduler or what lies below it, nor a backend.
"""
