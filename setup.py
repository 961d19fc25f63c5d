"""Maps the folders at the repository root to the package k3lab (see pyproject.toml for the rest)."""

from setuptools import find_packages, setup

FOLDERS = ("kernels", "tuning", "traces", "decode", "cli")
setup(
    packages=[
        f"k3lab.{name}"
        for folder in FOLDERS
        for name in (folder, *(f"{folder}.{sub}" for sub in find_packages(folder)))
    ],
    package_dir={f"k3lab.{folder}": folder for folder in FOLDERS},
    include_package_data=True,
)
