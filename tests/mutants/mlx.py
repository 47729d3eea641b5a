"""Bugs of the MLX backend: who sees what, what is written where, which models are taken, and who calls MLX."""

from tests.mutants.kill import Mutant

TESTS = (
    "tests/unit/backends/test_mlx_older_config.py",
    "tests/unit/backends/test_mlx_tiles.py",
    "tests/unit/backends/test_mlx_store.py",
    "tests/unit/backends/test_mlx_loading.py",
    "tests/unit/backends/test_mlx_runner.py",
    "tests/conformance/test_mlx.py",
)

TILES = "backends/mlx/tiles.py"
STORE = "backends/mlx/kv_store.py"
LAYERS = "backends/mlx/layers.py"
DECODER = "backends/mlx/decoder.py"
RUNNER = "backends/mlx/runner.py"
LOAD = "backends/mlx/load.py"
OLDER = "backends/mlx/older_config.py"
REGISTRY = "backends/load.py"

MUTANTS = [
    # -- tiles --
    Mutant("a row on MLX sees the next token", TILES, "tokens <= positions\n", "tokens <= positions + 1\n"),
    Mutant("a window on MLX is one token longer", TILES, "tokens > positions - window", "tokens >= positions - window"),
    Mutant(
        "the block where a window begins is not gathered",
        TILES,
        "max(0, first - window + 1) // block_size",
        "-(-max(0, first - window + 1) // block_size)",
    ),
    Mutant(
        "all blocks before a window are gathered", TILES, "first_block = 0 if window is None else", "first_block = 0 *"
    ),
    Mutant(
        "rows come back in the order of their tiles",
        TILES,
        "order[rows] = np.arange(num_placed, num_placed + len(rows))",
        "order[num_placed : num_placed + len(rows)] = rows",
    ),
    Mutant(
        "a call gathers as much as there is",
        TILES,
        "min(CALL_TOKENS // tokens, CALL_SCORES // (tokens * num_rows))",
        "CALL_SCORES // (tokens * num_rows)",
    ),
    Mutant("a long chunk is one call", TILES, "max(1, CALL_SCORES // (-(-end // block_size) * block_size))", "end"),
    Mutant("short sequences stand with long ones", TILES, "(len(piece.blocks) - 1).bit_length()", "0"),
    Mutant("every sequence is a call", TILES, "count = max(1, min(", "count = min(1, min("),
    # -- the store --
    Mutant("keys that are not finite are written", STORE, "mx.where(are_sound[0], keys, 0)", "keys"),
    Mutant("values that are not finite are written", STORE, "mx.where(are_sound[1], values, 0)", "values"),
    Mutant("values that are not finite are not told", STORE, " & are_sound[1].all(axis=(1, 2))", ""),
    Mutant(
        "what was before a write is held",
        STORE,
        "        self.keys[layer][places] =",
        "        self.earlier = self.keys[layer] + 0\n        self.keys[layer][places] =",
    ),
    Mutant("blocks are copied backwards on MLX", STORE, "for src, dst in copies:", "for src, dst in reversed(copies):"),
    Mutant("every layer gets the bytes of the first", STORE, "                first += num_bytes\n", ""),
    Mutant("bytes of any length are a block", STORE, "if len(content) != self.num_block_bytes:", "if False:"),
    # -- layers --
    Mutant("sinks are forgotten", LAYERS, 'call["scale"], call.get("sinks"))', 'call["scale"], None)'),
    Mutant(
        "rows are left in the order of their tiles",
        LAYERS,
        "mx.concatenate(parts)[tiles.order]",
        "mx.concatenate(parts)",
    ),
    Mutant("a layer may attend by itself", LAYERS, "of.num_answered != of.num_layers or not", "not"),
    Mutant("keys that are changed pass", LAYERS, 'if layer is None or call["mask"] is not None:', "if layer is None:"),
    # -- the model --
    Mutant(
        "a model that attends otherwise is taken", DECODER, "if not worst <= tolerance * max(1.0, most):", "if False:"
    ),
    Mutant("windows of the config are not followed", DECODER, "if windows is None else windows[: len(caches)]", ""),
    Mutant(
        "hidden states are of the wanted rows",
        DECODER,
        "self.hidden = out[:, 0]",
        "self.hidden = out[self._rows][:, 0]",
    ),
    Mutant("strange caches are taken", DECODER, "    if strange:\n", "    if False:\n"),
    # -- the runner --
    Mutant("whoever asks calls MLX", RUNNER, "return self._thread.submit(work).result()", "return work()"),
    Mutant("copies are left out", RUNNER, "        store.copy(plan.copies)\n", ""),
    Mutant("a step of any size runs", RUNNER, "if num_tokens > most:", "if False:"),
    Mutant("a closed runner keeps its pool", RUNNER, "self._model = self._store = None", "self._model = None"),
    # -- loading --
    Mutant("code that a directory brings is run", LOAD, "trust_remote_code=False", "trust_remote_code=True"),
    Mutant("rotations in newer words are not told", LOAD, "model_config=older,", "model_config={},"),
    Mutant("recurrent layers are tried", LOAD, "read_shape(config).recurrent is not None", "False"),
    Mutant("what is kept for later has no bound", LOAD, "    mx.set_cache_limit(plan.step_bytes)\n", ""),
    Mutant(
        "nobody hears that MLX is experimental",
        LOAD,
        "return (EXPERIMENTAL, windows) if num_windows else (EXPERIMENTAL,)",
        "return (windows,) if num_windows else ()",
    ),
    Mutant("the default rotation is a scaling", OLDER, 'if kind != "default":', "if True:"),
    Mutant("what is given is changed", OLDER, 'if config.get(name) is None or name == "text_config"', "if True"),
    Mutant("the base of sliding layers is lost", OLDER, 'found["rope_local_base_freq"]', 'found["nobody"]'),
    # -- which backend --
    Mutant("MLX is taken everywhere", REGISTRY, "and _is_on_apple_silicon() and", "and"),
    Mutant(
        "every Mac is Apple silicon",
        REGISTRY,
        'sys.platform == "darwin" and platform.machine() == "arm64"',
        'sys.platform == "darwin"',
    ),
    Mutant("nobody hears why MLX refused", REGISTRY, 'passed.append(f"not using MLX: {error}")', "pass"),
    Mutant(
        "what MLX refuses is not run",
        REGISTRY,
        "except (ConfigError, CheckpointError) as error:",
        "except ConfigError as error:",
    ),
    Mutant(
        "weights of mlx-lm need to be asked for",
        REGISTRY,
        ' or (settings.backend == "auto" and checkpoint.is_for_mlx):',
        ":",
    ),
    Mutant("torch is handed weights of mlx-lm", REGISTRY, "    if checkpoint.is_for_mlx:\n", "    if False:\n"),
]
