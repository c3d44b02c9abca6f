"""The same tokens through a model of transformers and through ours from a converted checkpoint, both in float32."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from qla_megatron.recipes.hugging_face import torch_dist
from qla_megatron.recipes.hugging_face.files import HfDirectory, open_directory
from qla_megatron.recipes.hugging_face.model import build_module, gpt_name, megatron_model, one_process
from qla_megatron.recipes.hugging_face.plan import MTP, progress_bar
from qla_megatron.recipes.hugging_face.to_hf import Export, export_layout, exported_model, plan_export
from qla_megatron.recipes.recipe import Model


@dataclass(frozen=True)
class Comparison:
    """One line of the table: a relative error and the largest one that passes."""

    what: str
    error: float
    tolerance: float

    @property
    def passes(self) -> bool:
        """Whether the error is a number and small enough."""
        return self.error <= self.tolerance


def compare(
    reference: Path,
    source: Path,
    console: Console,
    *,
    step: int | None = None,
    sequences: int = 2,
    length: int = 96,
    seed: int = 0,
    tolerance: float = 1e-4,
) -> list[Comparison]:
    """Compare logits and the weights of the multi-token prediction layer, which transformers does not have.

    The models are in memory one after the other, 4 bytes a parameter.

    Args:
        reference: the Hugging Face directory.
        source: the Megatron checkpoint, see export_checkpoint.
        console: for the progress bar.
        step: which checkpoint; None: the latest.
        sequences, length: random tokens, [sequences, length]; 96 tokens cross a chunk of the gated delta rule.
        seed: of the tokens.
        tolerance: largest relative L2 error. Of a single token ten times that is allowed: it has no average.

    Raises:
        ValueError: one of the two is incomplete, or they are different models, or transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("the comparison needs transformers, which is not installed: pip install 'transformers>=5.2'")
    hf = open_directory(reference)
    checkpoint = torch_dist.open_checkpoint(source, step)
    has_mtp = any(key.startswith(MTP) for key in checkpoint.tensors)
    layout = export_layout(checkpoint, hf, "keep" if has_mtp else "drop", text_only=False)
    model = exported_model(checkpoint, hf, layout)
    tokens = torch.randint(0, layout.vocab_size, (sequences, length), generator=torch.Generator().manual_seed(seed))
    expected = hugging_face_logits(hf, tokens)
    with one_process():
        export = plan_export(checkpoint, hf, layout, megatron_model(model))
        got = megatron_logits(replace(model, prediction_layers=0), export, tokens, console)[..., : layout.vocab_size]
        of_mtp = [name for name in export.expected if name.startswith(MTP)]
        mtp = _weights_error(export, of_mtp) if of_mtp else None
    per_token = [relative_error(g, e) for g, e in zip(got.flatten(0, 1), expected.flatten(0, 1), strict=True)]
    found = [
        Comparison(f"logits of {sequences} x {length} tokens", relative_error(got, expected), tolerance),
        Comparison("logits of the worst token", max(per_token), 10 * tolerance),
    ]
    return found if mtp is None else [*found, Comparison(f"{len(of_mtp)} weights of the MTP layer", mtp, tolerance)]


def hugging_face_logits(hf: HfDirectory, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of transformers' language model of the directory, float32.

    Raises:
        ValueError: transformers finds weights missing.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # it would name the packages that make it faster
    # The language model reads the flag in text_config, where models with vision may have a class's default.
    config = transformers.AutoConfig.from_pretrained(hf.path, local_files_only=True).get_text_config()
    config.tie_word_embeddings = "lm_head.weight" not in hf.tensors
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        hf.path, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    if found["missing_keys"]:
        raise ValueError(
            f"{hf.path} must hold all weights of {type(model).__name__}, got none of {found['missing_keys']}"
        )
    with torch.no_grad():
        return model.eval()(input_ids=tokens, use_cache=False).logits


def megatron_logits(model: Model, export: Export, tokens: torch.Tensor, console: Console) -> torch.Tensor:
    """Logits [B, T, padded V] of our model from the checkpoint of `export`, float32."""
    _, module = build_module(model, device="cpu")
    parameters = {gpt_name(name, model): parameter for name, parameter in module.named_parameters()}
    with torch.no_grad(), progress_bar(console, "loading", sum(p.nbytes for p in parameters.values())) as advance:
        for name, parameter in parameters.items():
            parameter.copy_(export.parameter(name))
            advance(parameter.nbytes)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return module.eval()(tokens, positions, None)


def _weights_error(export: Export, names: list[str]) -> float:
    return max(
        relative_error(tensor, export.hf.read(export.source_name(name)))
        for name, tensor in export.produce(names, lambda _: None)
    )


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error."""
    got, expected = got.double(), expected.double()
    return float(torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected))
