"""Build entry: everything static is in pyproject.toml; here are the native kernels, built where there is a compiler.

The native library knows nothing of Python: ctypes loads it. One library, and one wheel, serves every Python.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path("dgc_horovod/kernels/native/csrc")
# No fused multiply-add and no reordering: the kernels must give the same bits as NumPy does.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-fast-math", "-fvisibility=hidden", "-g0"]
# Linked with -ffast-math (a user's CXXFLAGS), the library would flush denormals in the whole process.
LINK_FLAGS = ["-pthread", "-fno-fast-math"]
# The inner loops, once for each instruction set; which one runs is decided on the user's processor.
WIDE = {
    "avx2.cpp": ["-mavx2", "-mbmi", "-mpopcnt"],
    "avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mbmi", "-mpopcnt"],
}
IS_X86 = platform.machine() in ("x86_64", "AMD64")


class BuildNative(build_ext):
    """Compiles each source with its own flags, which setuptools alone cannot."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.{platform.machine()}.so"  # as `kernels/native/library.py` looks for it

    def build_extension(self, ext: Extension) -> None:
        headers = [str(path) for path in sorted(CSRC.glob("*.h"))]
        objects = []
        for source in ext.sources:
            flags = [*FLAGS, *WIDE.get(Path(source).name, [])]
            objects += self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=flags, depends=headers
            )
        target = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(objects, target, target_lang="c++", extra_postargs=LINK_FLAGS)


class Wheel(bdist_wheel):
    """A wheel of this platform, for any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


sources = [str(path) for path in sorted(CSRC.glob("*.cpp")) if IS_X86 or path.name not in WIDE]
setup(
    # optional: without a compiler the package installs all the same, says once that it is slower, and works
    ext_modules=[Extension("dgc_horovod.kernels.native._native", sources, optional=True)],
    cmdclass={"bdist_wheel": Wheel, "build_ext": BuildNative},
)
