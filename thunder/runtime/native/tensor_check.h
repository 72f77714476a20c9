// The metadata of many tensors, compared in one call. `thunder/compat/batch_checks.py` says what is compared.

#pragma once

#include <Python.h>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <vector>

namespace tensor_check {

struct Expected {
  PyTypeObject* type;
  uint64_t keys;
  c10::ScalarType dtype;
  c10::Device device;
  bool requires_grad;
  std::vector<int64_t> sizes, strides;  // -1: any
};

struct Check {
  std::vector<Expected> tensors;
  std::vector<PyObject*> seen;  // a table of pointers, twice as large at least
};

inline uint64_t keys_of(const at::TensorBase& t) {
  auto local = c10::impl::tls_local_dispatch_key_set();
  return ((t.key_set() | local.included_) - local.excluded_).raw_repr();
}

inline bool fits(const std::vector<int64_t>& expected, c10::IntArrayRef now) {
  if (expected.size() != now.size()) return false;
  for (size_t i = 0; i < expected.size(); i++)
    if (expected[i] >= 0 && expected[i] != now[i]) return false;
  return true;
}

inline bool is_plain(const at::TensorBase& t) {
  return t.layout() == c10::kStrided && !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

inline bool is(PyObject* object, const Expected& expected) {
  if (Py_TYPE(object) != expected.type) return false;
  const at::Tensor& t = THPVariable_Unpack(object);
  if (!t.defined() || keys_of(t) != expected.keys || t.scalar_type() != expected.dtype) return false;
  if (t.device() != expected.device || t.requires_grad() != expected.requires_grad || !is_plain(t)) return false;
  return fits(expected.sizes, t.sizes()) && (expected.strides.empty() || fits(expected.strides, t.strides()));
}

// Whether no tensor comes twice.
inline bool differ(Check& check, PyObject* const* objects) {
  auto& seen = check.seen;
  std::fill(seen.begin(), seen.end(), nullptr);
  const size_t mask = seen.size() - 1;
  for (size_t i = 0; i < check.tensors.size(); i++) {
    size_t at = (reinterpret_cast<uintptr_t>(objects[i]) * 0x9E3779B97F4A7C15ull >> 20) & mask;
    for (; seen[at] != nullptr; at = (at + 1) & mask)
      if (seen[at] == objects[i]) return false;
    seen[at] = objects[i];
  }
  return true;
}

inline PyObject* check(PyObject* self, PyObject* const* objects, Py_ssize_t given) {
  auto& c = *static_cast<Check*>(PyCapsule_GetPointer(self, nullptr));
  if (static_cast<size_t>(given) != c.tensors.size()) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < given; i++)
    if (!is(objects[i], c.tensors[i])) Py_RETURN_FALSE;
  return PyBool_FromLong(differ(c, objects));
}

inline PyMethodDef definition = {"check", (PyCFunction)(void (*)(void))check, METH_FASTCALL, nullptr};

inline void forget(PyObject* capsule) { delete static_cast<Check*>(PyCapsule_GetPointer(capsule, nullptr)); }

inline bool read(PyObject* numbers, std::vector<int64_t>& into) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); i++) {
    PyObject* n = PyTuple_GET_ITEM(numbers, i);
    into.push_back(n == Py_None ? -1 : PyLong_AsLongLong(n));
  }
  return !PyErr_Occurred();
}

// check_of(tensors, sizes, strides): tuples; strides are () for a tensor whose strides are not compared. None where a
// tensor is of a kind that this check does not know.
inline PyObject* check_of(PyObject*, PyObject* arguments) {
  PyObject *tensors, *sizes, *strides;
  if (!PyArg_ParseTuple(arguments, "O!O!O!", &PyTuple_Type, &tensors, &PyTuple_Type, &sizes, &PyTuple_Type, &strides))
    return nullptr;
  auto made = std::make_unique<Check>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
    PyObject* object = PyTuple_GET_ITEM(tensors, i);
    if (!THPVariable_Check(object)) Py_RETURN_NONE;
    const at::Tensor& t = THPVariable_Unpack(object);
    if (!is_plain(t)) Py_RETURN_NONE;
    Expected e{Py_TYPE(object), keys_of(t), t.scalar_type(), t.device(), t.requires_grad(), {}, {}};
    if (!read(PyTuple_GET_ITEM(sizes, i), e.sizes) || !read(PyTuple_GET_ITEM(strides, i), e.strides)) return nullptr;
    made->tensors.push_back(std::move(e));
  }
  size_t size = 16;
  while (size < 2 * made->tensors.size()) size *= 2;
  made->seen.resize(size);
  PyObject* capsule = PyCapsule_New(made.release(), nullptr, forget);
  PyObject* function = capsule == nullptr ? nullptr : PyCFunction_New(&definition, capsule);
  Py_XDECREF(capsule);
  return function;
}

}  // namespace tensor_check
