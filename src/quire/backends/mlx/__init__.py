"""The MLX backend, for Apple silicon: mlx-lm's models over quire's blocks. No torch. On Linux it runs on MLX's CPU
build, slowly, which is how it is tested.

runner        a plan in, a result out; one thread owns MLX
decoder       a model of mlx-lm over flat rows, asked at load whether its attention is one we can replace
layers        what a layer of it takes for its cache, and the attention it calls
tiles         a step's rows as attention takes them
kv_store      the paged KV memory's data, written in place
older_config  a config.json in the words that mlx-lm reads
imported      mlx-lm, without what its import does to the process
load          a checkpoint to a runner, within a budget
"""
