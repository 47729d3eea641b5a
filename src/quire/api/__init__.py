"""The HTTP API: requests in, valid requests on, events out. Locked by default, bounded everywhere, honest under load.

    http.protocol ─► asgi ─► access.auth ─► http.body ─► dialects ─► EngineClient.ask ─► pieces ─► dialects ─► bytes
    bytes            ids, log   keys           JSON         schemas                                 writers

`http/` is bytes and HTTP, `access/` who may ask and how much, `dialects/` what an API's bodies and answers look like;
`asgi` names every request and logs it, `app` has the routes, `admin` the operator's socket, `listening` opens sockets,
`server` and `serving` are the whole. May import client, observe, core.request, core.shares, errors, config; never the
scheduler or what lies below it, nor a backend.
"""
