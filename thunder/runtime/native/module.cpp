// The extension: the host side of a warm call, without Python. `thunder/runtime/extensions.py` builds and loads it.

#include "launch_loop.h"
#include "modes.h"
#include "tensor_check.h"

namespace {

PyMethodDef functions[] = {
    {"check_of", tensor_check::check_of, METH_VARARGS, nullptr},
    {"observed", launch_loop::observed, METH_VARARGS, nullptr},
    {"unseen", launch_loop::unseen, METH_O, nullptr},
    {"kernels", launch_loop::kernels, METH_VARARGS, nullptr},
    {"loop_of", launch_loop::loop_of, METH_VARARGS, nullptr},
    {"modes_key_of", modes::modes_key_of, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "thunder_native", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_thunder_native(void) { return PyModule_Create(&module); }
