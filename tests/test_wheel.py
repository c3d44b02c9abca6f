"""The built wheel holds the whole package and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    for name in listed:
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("qla_megatron-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top_level = {name.split("/")[0] for name in names}
    assert {t for t in top_level if not t.endswith(".dist-info")} == {"qla_megatron"}
    expected = {
        p
        for p in listed
        if p.startswith("qla_megatron/") and p.endswith((".py", "README.md", "py.typed")) and (ROOT / p).exists()
    }
    assert expected <= set(names), f"not in the wheel: {sorted(expected - set(names))}"
    metadata = next(n for n in names if n.endswith(".dist-info/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    for requirement in ("torch", "megatron-core", "tilelang", "apache-tvm-ffi", "psutil"):
        assert f"Requires-Dist: {requirement}" in text
