"""What csrc/python.h declares is what Python's own headers do, in the stable ABI of 3.10."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from shardsum.native import recipe as building

HEADERS = Path(sysconfig.get_path("include"))
CHECK = """
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <cstddef>
{undefined}
extern "C" {{ {declared} }}
static_assert(METH_FASTCALL == {fastcall} && Py_EQ == {equal});
static_assert(sizeof(PyObject) == 2 * sizeof(void*) && offsetof(PyObject, ob_type) == sizeof(void*));
static_assert(offsetof(PyMethodDef, ml_meth) == sizeof(void*) && offsetof(PyMethodDef, ml_flags) == 2 * sizeof(void*));
static_assert(offsetof(PyMethodDef, ml_doc) == 3 * sizeof(void*));
const void* const singletons[] = {{Py_None, Py_True, Py_False}};
"""


def compiles(text: str) -> subprocess.CompletedProcess:
    command = ["g++", "-std=c++17", f"-I{HEADERS}", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True)


@pytest.mark.skipif(not shutil.which("g++") or not (HEADERS / "Python.h").exists(), reason="needs g++ and Python.h")
def test_python_declares_the_same() -> None:
    """Names that the limited API lacks, and declarations that differ, do not compile beside its own."""
    source = (building.source_folder() / "python.h").read_text()
    found = re.findall(r"^([\w: ]+[ *]+(\w+)\([^()]*\);)", source, re.MULTILINE)
    functions, declared = [name for _, name in found], [line for line, _ in found]
    declared += re.findall(r"^extern (?:PyTypeObject|PyObject \*).*", source, re.MULTILINE)
    assert len(functions) >= 20 and len(declared) == len(functions) + 2
    values = dict(re.findall(r"constexpr int (\w+) = (\w+);", source))
    undefined = "\n".join(f"#undef {name}" for name in functions)
    uses = "".join(f"const auto use_{name} = &{name};\n" for name in functions)
    fields = {"undefined": undefined, "fastcall": values["METH_FASTCALL"], "equal": values["Py_EQ"]}
    done = compiles(CHECK.format(declared="", **fields) + uses)  # all are in the limited API
    assert done.returncode == 0, done.stderr
    done = compiles(CHECK.format(declared="\n".join(declared), **fields))
    assert done.returncode == 0, done.stderr
    wrong = "\n".join(declared).replace("double PyFloat_AsDouble", "float PyFloat_AsDouble")
    assert "PyFloat_AsDouble" in compiles(CHECK.format(declared=wrong, **fields)).stderr
