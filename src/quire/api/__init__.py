"""The HTTP API: validates requests, submits them to engine clients, and streams the output.

    http.protocol ─► asgi ─► access.auth ─► http.body ─► dialects ─► EngineClient.submit ─► pieces ─► dialects ─► bytes
    bytes            ids, log   keys           JSON         schemas                                    writers

`http/` has the protocol, limits and errors, `access/` keys, quotas and admission, `dialects/` the bodies and responses
of each API. `asgi` assigns request ids and logs, `app` has the routes, `admin` the operator's routes, `listening` opens
sockets, `server` and `serving` run the whole server. May import client, observe, core.request, core.shares, errors and
config, but never the scheduler, the layers below it, or a backend.
"""
