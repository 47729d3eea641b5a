"""The MLX backend, for Apple silicon: runs mlx-lm's models over quire's KV blocks, without torch. Tests on Linux use
MLX's CPU build, which is slow.

runner        executes a plan; one thread owns MLX
decoder       an mlx-lm model over flat rows; at load it checks that the model's attention can be replaced
layers        the cache objects that a model's layers receive, and the attention function they call
tiles         the rows of a step, grouped for attention
kv_store      the data of the paged KV memory, written in place
imported      mlx-lm, imported without its side effects on the process
load          loads a checkpoint into a runner, within a memory budget
"""
