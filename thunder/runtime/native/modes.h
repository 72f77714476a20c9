// The cache key of the modes around a call, computed only where the state that it depends on has changed.
// `thunder/compat/modes.py` says what the key is.

#pragma once

#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <array>
#include <memory>
#include <vector>

namespace modes {

// The dispatch keys of a thread tell autocast, torch.func, dispatch modes and inference mode.
struct Native {
  uint64_t included, excluded;
  bool grad, inference;
  c10::ScalarType dtype;
  bool operator==(const Native&) const = default;

  static Native now() {
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    return {keys.included_.raw_repr(), keys.excluded_.raw_repr(), c10::GradMode::is_enabled(),
            c10::InferenceMode::is_enabled(), c10::get_default_dtype_as_scalartype()};
  }
};

constexpr size_t VALUES = 6;

struct Entry {
  Native native;
  std::array<PyObject*, VALUES> values{};  // references
  PyObject* key = nullptr;
};

struct Key {
  PyObject *compute, *objects, *methods, *modules, *module, *stance;
  std::vector<std::pair<PyObject*, PyObject*>> watched;  // dicts and keys
  std::array<Entry, 4> entries;  // the last one that was used comes first

  ~Key() {
    Py_XDECREF(objects);
    for (auto& entry : entries) {
      for (auto* value : entry.values) Py_XDECREF(value);
      Py_XDECREF(entry.key);
    }
  }
};

inline const char* const KEY = "thunder.Key";

// Whether no mode is active of which the key holds more than the dispatch keys tell.
inline bool is_plain() {
  return at::impl::PythonTorchFunctionTLS::stack_len() == 0 && c10::impl::TorchDispatchModeTLS::stack_len() == 0 &&
      !torch::jit::tracer::isTracing();
}

// References to the Python values that the key depends on. False with an error.
inline bool read(const Key& key, std::array<PyObject*, VALUES>& values) {
  size_t at = 0;
  for (const auto& [table, name] : key.watched) {
    PyObject* value = PyDict_GetItemWithError(table, name);
    if (value == nullptr && PyErr_Occurred()) return false;
    values[at++] = Py_XNewRef(value);
  }
  const Py_ssize_t methods = PyObject_Size(key.methods);
  if (methods < 0 || (values[at++] = PyLong_FromSsize_t(methods)) == nullptr) return false;
  PyObject* dynamo = PyDict_GetItemWithError(key.modules, key.module);
  if (dynamo == nullptr) return !PyErr_Occurred();
  PyObject* holder = PyObject_GetAttr(dynamo, key.stance);
  if (holder == nullptr) return false;
  values[at] = PyObject_GetAttrString(holder, "stance");
  Py_DECREF(holder);
  return values[at] != nullptr;
}

// Compares by identity: another object with the same meaning has the key computed again.
inline bool same(const std::array<PyObject*, VALUES>& a, const std::array<PyObject*, VALUES>& b, size_t number) {
  for (size_t i = 0; i < VALUES; i++)
    if (a[i] != b[i] && (i != number || a[i] == nullptr || b[i] == nullptr || PyLong_AsLong(a[i]) != PyLong_AsLong(b[i])))
      return false;
  return true;
}

inline PyObject* current(PyObject* self, PyObject*) {
  auto& key = *static_cast<Key*>(PyCapsule_GetPointer(self, KEY));
  if (!is_plain()) return PyObject_CallNoArgs(key.compute);
  const auto native = Native::now();
  std::array<PyObject*, VALUES> values{};
  PyObject* result = nullptr;
  if (read(key, values)) {
    for (size_t i = 0; i < key.entries.size() && result == nullptr; i++)
      if (key.entries[i].key != nullptr && key.entries[i].native == native &&
          same(key.entries[i].values, values, key.watched.size())) {
        if (i > 0) std::swap(key.entries[i], key.entries[0]);
        result = Py_NewRef(key.entries[0].key);
      }
    if (result == nullptr && (result = PyObject_CallNoArgs(key.compute)) != nullptr &&
        PyTuple_GET_ITEM(result, 3) == Py_None) {  // no autocast, the types of which no dispatch key tells
      auto& last = key.entries.back();
      std::swap(last.values, values);
      last.native = native;
      PyObject* old = last.key;
      last.key = Py_NewRef(result);
      std::swap(last, key.entries[0]);
      Py_XDECREF(old);
    }
  }
  for (auto* value : values) Py_XDECREF(value);
  return result;
}

inline PyMethodDef definition = {"modes_key", current, METH_NOARGS, nullptr};

inline void forget(PyObject* capsule) { delete static_cast<Key*>(PyCapsule_GetPointer(capsule, KEY)); }

// modes_key_of(compute, watched, methods, modules, module, attribute): a function without arguments that returns what
// `compute` returns. watched: pairs of a dict and a key; methods: a mapping, the size of which counts; modules: where
// `module` may stand, which then has a `stance` in this attribute.
inline PyObject* modes_key_of(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject* watched;
  auto made = std::make_unique<Key>();
  made->objects = nullptr;
  if (!PyArg_ParseTuple(given, "OO!OO!OO", &made->compute, &PyTuple_Type, &watched, &made->methods, &PyDict_Type,
                        &made->modules, &made->module, &made->stance))
    return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watched); i++) {
    PyObject *table, *name;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(watched, i), "O!O", &PyDict_Type, &table, &name)) return nullptr;
    made->watched.emplace_back(table, name);
  }
  if (made->watched.size() + 2 > VALUES) {
    PyErr_SetString(PyExc_ValueError, "too many values are watched");
    return nullptr;
  }
  made->objects = Py_NewRef(given);  // which holds all of them
  PyObject* capsule = PyCapsule_New(made.release(), KEY, forget);
  PyObject* function = capsule == nullptr ? nullptr : PyCFunction_New(&definition, capsule);
  Py_XDECREF(capsule);
  return function;
  END_HANDLE_TH_ERRORS
}

}  // namespace modes
