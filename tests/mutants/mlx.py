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
BLOCKS = "backends/host/block_store.py"
LAYERS = "backends/mlx/layers.py"
DECODER = "backends/mlx/decoder.py"
RUNNER = "backends/mlx/runner.py"
BASE = "backends/host/runner_base.py"
LOAD = "backends/mlx/load.py"
REGISTRY = "backends/load.py"

MUTANTS = [
    # -- tiles --
    Mutant("a row on MLX sees the next token", TILES, "_tile", "tokens <= positions", "tokens <= positions + 1"),
    Mutant(
        "a window on MLX is one token longer",
        TILES,
        "_tile",
        "tokens > positions - window",
        "tokens >= positions - window",
    ),
    Mutant(
        "the block where a window begins is not gathered",
        TILES,
        "_pieces",
        "max(0, first - window + 1) // block_size",
        "-(-max(0, first - window + 1) // block_size)",
    ),
    Mutant(
        "all blocks before a window are gathered",
        TILES,
        "_pieces",
        "first_block = 0 if window is None else",
        "first_block = 0 *",
    ),
    Mutant(
        "rows come back in the order of their tiles",
        TILES,
        "make_tiles",
        "order[rows] = np.arange(num_done, num_done + len(rows))",
        "order[num_done : num_done + len(rows)] = rows",
    ),
    Mutant(
        "a call gathers as much as there is",
        TILES,
        "_groups",
        "min(CALL_TOKENS // tokens, CALL_SCORES // (tokens * num_rows))",
        "CALL_SCORES // (tokens * num_rows)",
    ),
    Mutant(
        "a long chunk is one call",
        TILES,
        "_pieces",
        "max(1, CALL_SCORES // (-(-end // block_size) * block_size))",
        "end",
    ),
    Mutant("short sequences stand with long ones", TILES, "_groups", "(len(piece.blocks) - 1).bit_length()", "0"),
    Mutant("every sequence is a call", TILES, "_groups", "group_size = max(1, min(", "group_size = min(1, min("),
    # -- the store --
    Mutant("keys that are not finite are written", STORE, "KVStore.write", "mx.where(are_finite[0], keys, 0)", "keys"),
    Mutant(
        "values that are not finite are written", STORE, "KVStore.write", "mx.where(are_finite[1], values, 0)", "values"
    ),
    Mutant("values that are not finite are not told", STORE, "KVStore.write", "& are_finite[1].all(axis=(1, 2))", ""),
    Mutant(
        "what was before a write is held",
        STORE,
        "KVStore.write",
        "self.keys[layer][kv_indices] =",
        "self.earlier = self.keys[layer] + 0\nself.keys[layer][kv_indices] =",
    ),
    Mutant(
        "blocks are copied backwards on MLX",
        STORE,
        "KVStore.copy",
        "for src, dst in copies:",
        "for src, dst in reversed(copies):",
    ),
    Mutant("every layer gets the bytes of the first", BLOCKS, "BlockStore.write_blocks", "first += num_bytes", ""),
    Mutant(
        "bytes of any length are a block",
        BLOCKS,
        "BlockStore.write_blocks",
        "if len(content) != self.num_block_bytes:",
        "if False:",
    ),
    # -- layers --
    Mutant(
        "sinks are forgotten",
        LAYERS,
        "_with_paged_attention.attention",
        'call["scale"], call.get("sinks"))',
        'call["scale"], None)',
    ),
    Mutant(
        "rows are left in the order of their tiles",
        LAYERS,
        "PagedLayer.attend",
        "mx.concatenate(parts)[tiles.order]",
        "mx.concatenate(parts)",
    ),
    Mutant(
        "a layer may attend by itself",
        LAYERS,
        "use_pass",
        "forward_pass.num_calls != forward_pass.num_layers or not",
        "not",
    ),
    Mutant(
        "keys that are changed pass",
        LAYERS,
        "_with_paged_attention.attention",
        'if layer is None or call["mask"] is not None:',
        "if layer is None:",
    ),
    # -- the model --
    Mutant(
        "a model that attends otherwise is taken",
        DECODER,
        "Decoder._check_logits",
        "if not max_error <= tolerance * max(1.0, max_logit):",
        "if False:",
    ),
    Mutant(
        "windows of the config are not followed",
        DECODER,
        "Decoder.__init__",
        "if windows is None else windows[: len(caches)]",
        "",
    ),
    Mutant(
        "hidden states are of the requested rows",
        DECODER,
        "_HeadRows.__call__",
        "self.hidden = hidden[:, 0]",
        "self.hidden = hidden[self._rows][:, 0]",
    ),
    Mutant("strange caches are taken", DECODER, "_make_caches", "if unsupported:", "if False:"),
    # -- the runner --
    Mutant("any thread calls MLX", RUNNER, "MlxThread.call", "self._executor.submit(function).result()", "function()"),
    Mutant("copies are left out", RUNNER, "MlxRunner._begin", "store.copy(plan.copies)", ""),
    Mutant("a step of any size runs", BASE, "RunnerBase._check_size", "if num_tokens > limit:", "if False:"),
    Mutant(
        "a closed runner keeps its pool",
        BASE,
        "RunnerBase.close",
        "self._model = self._store = None",
        "self._model = None",
    ),
    # -- loading --
    Mutant(
        "code that a directory brings is run", LOAD, "load_model", "trust_remote_code=False", "trust_remote_code=True"
    ),
    Mutant(
        "rotations in newer words are not told", LOAD, "load_model", "model_config=legacy_fields,", "model_config={},"
    ),
    Mutant("recurrent layers are tried", LOAD, "why_not_mlx", "read_shape(config).recurrent is not None", "False"),
    Mutant("what is kept for later has no bound", LOAD, "_load", "mx.set_cache_limit(plan.step_bytes)", ""),
    Mutant(
        "nobody hears that MLX is experimental",
        LOAD,
        "_notes",
        "return (EXPERIMENTAL, window_note) if num_windows else (EXPERIMENTAL,)",
        "return (window_note,) if num_windows else ()",
    ),
    Mutant("the default rotation is a scaling", LOAD, "_legacy_rope_fields", 'if kind != "default":', "if True:"),
    Mutant(
        "what is given is changed",
        LOAD,
        "legacy_config_fields",
        'if config.get(name) is None or name == "text_config"',
        "if True",
    ),
    Mutant(
        "the base of sliding layers is lost",
        LOAD,
        "_legacy_rope_fields",
        'fields["rope_local_base_freq"]',
        'fields["none"]',
    ),
    # -- which backend --
    Mutant("MLX is taken everywhere", REGISTRY, "load_backend", "and _is_on_apple_silicon() and", "and"),
    Mutant(
        "every Mac is Apple silicon",
        REGISTRY,
        "_is_on_apple_silicon",
        'sys.platform == "darwin" and platform.machine() == "arm64"',
        'sys.platform == "darwin"',
    ),
    Mutant(
        "nobody hears why MLX refused",
        REGISTRY,
        "load_backend",
        'fallback_notes.append(f"not using MLX: {error}")',
        "pass",
    ),
    Mutant(
        "what MLX refuses is not run",
        REGISTRY,
        "load_backend",
        "except (ConfigError, CheckpointError) as error:",
        "except ConfigError as error:",
    ),
    Mutant(
        "weights of mlx-lm need to be asked for",
        REGISTRY,
        "load_backend",
        'or (settings.backend == "auto" and checkpoint.is_for_mlx):',
        ":",
    ),
    Mutant("torch is handed weights of mlx-lm", REGISTRY, "_load_torch", "if checkpoint.is_for_mlx:", "if False:"),
]
