"""Everything about the package stands in pyproject.toml, but this: with a native library inside, its wheel is for one
platform, though for every Python 3, since torch loads the library and not Python."""

from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class ShardsumDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return (Path(__file__).parent / "shardsum" / "_native.so").exists()


class ShardsumWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(distclass=ShardsumDistribution, cmdclass={"bdist_wheel": ShardsumWheel})
