"""Documents -> packed sequences: text to Megatron's files, files to aligned packs, packs to micro-batches."""
