"""Build entry: everything static is in pyproject.toml; here are the native kernels, built where there is a compiler."""

import platform
from pathlib import Path

from setuptools import Extension, setup
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


sources = [str(path) for path in sorted(CSRC.glob("*.cpp")) if IS_X86 or path.name not in WIDE]
setup(
    # optional: without a compiler the package installs all the same, says once that it is slower, and works
    ext_modules=[Extension("dgc_horovod.kernels.native._native", sources, optional=True)],
    cmdclass={"build_ext": BuildNative},
)
