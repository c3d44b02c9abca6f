"""Packaging of qla_megatron. Ranges here; the exact versions that are tested together are in requirements.lock."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="qla-megatron",
    version="0.1.0",
    description="Gated DeltaNet for Megatron: kernels for Hopper, a tensor-parallel layer, pretraining recipes",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    # An explicit "" keeps an editable install a plain path, which type checkers follow.
    package_dir={"": "."},
    packages=find_packages(include=["qla_megatron", "qla_megatron.*"]),
    package_data={"qla_megatron": ["py.typed", "kernels/*/README.md"]},
    install_requires=[
        "torch>=2.8",
        "megatron-core>=0.19.0,<0.20",
        "psutil",  # megatron-core imports it when it writes a checkpoint, without asking for it
        "tilelang>=0.1.15,<0.2",
        "apache-tvm-ffi>=0.1.11,<0.1.13",  # tilelang 0.1.15 breaks on newer ones
        "z3-solver<4.15.5",  # likewise
        "numpy",
        "omegaconf>=2.4",
        "rich>=13",
        "tokenizers>=0.20",
        "safetensors>=0.4",
        "tensorboard",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.8"],
        "dev": ["pytest>=8", "pytest-timeout", "ruff", "mypy", "transformers>=5.2", "matplotlib"],
    },
)
