"""Released Qwen3.5 and Qwen3.6 checkpoints in Hugging Face's format <-> Megatron's distributed checkpoints.

    files.py        a Hugging Face directory: its tensors, shard by shard
    torch_dist.py   a Megatron checkpoint: its tensors, one at a time
    model.py        config.json -> a recipe's Model, and the names under which Megatron saves that model
    plan.py         what the two directions share: which tensors, checked before anything is written
    to_megatron.py  import
    to_hf.py        export
    check.py        the logits of both

`tools/convert_checkpoint.py` is the command line.
"""
