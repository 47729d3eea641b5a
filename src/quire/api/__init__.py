"""The HTTP API: requests in, valid requests on, events out. Locked by default, bounded everywhere, honest under load.

    http.protocol ─► asgi ─► access.auth ─► http.body ─► dialects ─► EngineClient.submit ─► pieces ─► dialects ─► bytes
    bytes            ids, log   keys           JSON         schemas                                    writers

`http/` is bytes and HTTP, `access/` keys, quotas and admission, `dialects/` the bodies and responses of each API;
`asgi` names every request and logs it, `app` has the routes, `admin` the operator's socket, `listening` opens sockets,
`server` and `serving` are the whole. May import client, observe, core.request, core.shares, errors, config; never the
scheduler or what lies below it, nor a backend.
"""
