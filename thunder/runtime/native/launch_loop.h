// Bound symbols of PyTorch in a loop: operators called boxed by their handles, values freed at their last use.
// `thunder/runtime/launch_loop.py` says which bound symbols a loop takes.

#pragma once

#include <Python.h>
#include <frameobject.h>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/library.h>

#include <time.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace launch_loop {

using Stack = torch::jit::Stack;

// -------------------------------------------------------------------------------------------------------- observing
// A function of PyTorch runs under a dispatch key, the fallback of which takes note of the operators that are called,
// with their arguments. Nothing is computed: views of meta tensors are made, and any other operator is the
// last one.

constexpr auto OBSERVING = c10::DispatchKey::TESTING_ONLY_GenericMode;

struct Call {
  c10::OperatorHandle op;
  Stack arguments, results;
};

struct Observation {
  bool goes_on = false;  // behind the first operator
  bool ended = false, failed = false;
  std::vector<Call> calls;
};

inline thread_local Observation* observation = nullptr;

struct Observed : std::exception {};

inline bool is_tensors(const c10::FunctionSchema& schema) {
  return std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& x) {
    return x.type()->kind() == c10::TypeKind::TensorType;
  });
}

inline bool is_list(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType &&
      *returns[0].type()->expectRef<c10::ListType>().getElementType() == *c10::TensorType::get();
}

inline bool is_view(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return returns.size() == 1 && (is_tensors(schema) || is_list(schema)) && returns[0].alias_info() != nullptr &&
      !returns[0].alias_info()->isWrite();
}

inline void observe(const c10::OperatorHandle& op, Stack* stack) {
  if (observation == nullptr) throw Observed();
  auto& now = *observation;
  const auto& schema = op.schema();
  auto given = torch::jit::last(*stack, schema.arguments().size());
  now.failed |= now.ended;
  now.calls.push_back({op, Stack(given.begin(), given.end()), {}});
  if (!now.goes_on || now.failed || !(is_tensors(schema) || is_view(schema))) throw Observed();
  c10::impl::ExcludeDispatchKeyGuard below(OBSERVING);
  if (is_view(schema)) {
    op.callBoxed(stack);
  } else {
    torch::jit::drop(*stack, schema.arguments().size());
    for (size_t i = 0; i < schema.returns().size(); i++)
      stack->push_back(at::empty({0}, at::TensorOptions(c10::kMeta)));
  }
  now.ended = !is_view(schema) || is_list(schema);
  auto results = torch::jit::last(*stack, schema.returns().size());
  now.calls.back().results.assign(results.begin(), results.end());
}

// Registered at the first use: an error is raised then.
inline void register_observer() {
  static torch::Library library = [] {
    torch::Library made(torch::Library::IMPL, "_", OBSERVING, __FILE__, __LINE__);
    made.fallback(torch::CppFunction::makeFromBoxedFunction<&observe>());
    return made;
  }();
}

// ------------------------------------------------------------------------------------------------------ instructions
// Values have numbers. Those between the operators of one bound symbol have negative ones, from TEMPORARY on down.

constexpr int NONE = -1, TEMPORARY = -2;

struct Value {  // of an argument, or of an element of a list of tensors
  int number = NONE;  // NONE: the constant
  bool last = false;
  c10::IValue constant;
};

struct Argument {
  enum Kind { ONE, TENSORS, OPTIONAL_TENSORS } kind = ONE;
  std::vector<Value> values;
};

// The kernels of a fused region on the CPU, as one function of the addresses of inputs, results and scratch memory.
struct Kernels {
  struct Form {
    std::vector<int64_t> sizes, strides;
    c10::ScalarType dtype;

    bool fits(const at::Tensor& x) const {
      return x.sizes() == sizes && x.strides() == strides && x.scalar_type() == dtype && !x.is_neg() && !x.is_conj();
    }
  };

  void (*function)(char* const*, int, int*);
  std::vector<Form> inputs, outputs;
  int64_t shared, own;            // bytes of scratch memory: of all threads, and of each
  PyObject* otherwise = nullptr;  // the region, for inputs of other forms
  ~Kernels() { Py_XDECREF(otherwise); }
};

struct Instruction {
  std::optional<c10::OperatorHandle> op;  // or kernels
  std::shared_ptr<Kernels> kernels;
  std::vector<Argument> arguments;
  std::vector<int> results;
  std::vector<int> dead;  // values that are freed behind it and that no argument takes along
};

struct Line {
  std::vector<Instruction> instructions;
  int number = 0;
};

inline const char* const LINE = "thunder.Line";

inline bool is_fixed(const c10::IValue& x) {
  return x.isNone() || x.isInt() || x.isDouble() || x.isComplexDouble() || x.isBool() || x.isDevice() || x.isString() ||
      x.isIntList() || x.isDoubleList() || x.isBoolList() || x.isTensor();
}

// The numbers of tensors; none of them is freed meanwhile.
struct Known {
  std::vector<std::pair<const c10::TensorImpl*, int>> tensors;
  std::vector<bool> read;

  void add(const at::Tensor& x, int number) {
    tensors.emplace_back(x.unsafeGetTensorImpl(), number);
    read.push_back(false);
  }

  Value operator()(const c10::IValue& x) {
    if (x.isTensor() && x.toTensor().defined())
      for (size_t i = tensors.size(); i-- > 0;)
        if (x.toTensor().unsafeGetTensorImpl() == tensors[i].first) {
          read[i] = true;
          return {tensors[i].second, false, {}};
        }
    return {NONE, false, x};
  }
};

inline bool read_arguments(const Stack& stack, Known& known, Instruction& into) {
  for (const auto& x : stack) {
    Argument argument;
    if (x.isTensorList() || x.isOptionalTensorList()) {
      argument.kind = x.isTensorList() ? Argument::TENSORS : Argument::OPTIONAL_TENSORS;
      for (const c10::IValue& one : x.toList()) argument.values.push_back(known(one));
    } else if (is_fixed(x)) {
      argument.values.push_back(known(x));
    } else {
      return false;
    }
    into.arguments.push_back(std::move(argument));
  }
  return true;
}

// The last argument that reads a value takes it along. False where none does.
inline bool mark_last(std::vector<Instruction>& instructions, int number) {
  for (size_t i = instructions.size(); i-- > 0;) {
    Value* last = nullptr;
    for (auto& argument : instructions[i].arguments)
      for (auto& value : argument.values)
        if (value.number == number) last = &value;
    if (last != nullptr) return last->last = true;
  }
  return false;
}

inline bool is_named(const std::string& op, const std::string& function) {
  const std::string bare = op.substr(op.rfind(':') + 1);
  const auto at = bare.size() - std::min(bare.size(), function.size());
  return op == function || bare == function ||
      (at > 0 && bare.compare(at, std::string::npos, function) == 0 && bare[at - 1] == '_');
}

inline bool read_numbers(PyObject* tuple, std::vector<int>& into) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
    into.push_back(static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(tuple, i))));
  return !PyErr_Occurred();
}

inline void forget_line(PyObject* capsule) { delete static_cast<Line*>(PyCapsule_GetPointer(capsule, LINE)); }

// The results of the one operator of a function, in order.
inline bool take_results(const Call& call, const std::vector<int>& results, Instruction& into) {
  const auto& schema = call.op.schema();
  if (!is_list(schema) && !is_tensors(schema)) return false;
  if (!is_list(schema) && !results.empty() && results.size() != schema.returns().size()) return false;
  into.results = results;
  return true;
}

// A function returned the list that its last operator is, or one tensor that an operator is.
inline bool take_returned(PyObject* returned, const std::vector<Call>& calls, const std::vector<int>& results,
                          std::vector<Instruction>& into) {
  auto is = [](PyObject* object, const at::Tensor& x) {
    return THPVariable_Check(object) && THPVariable_Unpack(object).is_same(x);
  };
  if (PyTuple_Check(returned) || PyList_Check(returned)) {
    if (!is_list(calls.back().op.schema())) return false;
    const auto list = calls.back().results[0].toTensorVector();
    if (list.size() != results.size() || static_cast<size_t>(PySequence_Fast_GET_SIZE(returned)) != list.size())
      return false;
    for (size_t i = 0; i < list.size(); i++)
      if (!is(PySequence_Fast_GET_ITEM(returned, i), list[i])) return false;
    into.back().results = results;
    return true;
  }
  for (size_t i = calls.size(); results.size() == 1 && i-- > 0;)
    for (size_t k = 0; k < into[i].results.size(); k++)
      if (is(returned, calls[i].results[k].toTensor())) {
        into[i].results[k] = results[0];
        return true;
      }
  return false;
}

// observed(function, name, several, arguments, keywords, examples, numbers, results, dead, line): the operators that a
// call of a function is. name: that of the function, which its operator has; None where it may be another one. several:
// whether the function may do more than to call one operator; then it returns one tensor, or a list. examples: the
// tensors among the arguments, for the values of `numbers`. results, dead: numbers; -1 for a result that is not used.
// Returns None where the call is something else, or an operator of another library than PyTorch's own.
inline PyObject* observed(PyObject*, PyObject* given) {
  PyObject *function, *arguments, *keywords, *examples, *numbers, *results, *dead;
  const char* name;
  int line, several;
  if (!PyArg_ParseTuple(given, "OzpO!O!O!O!O!O!i", &function, &name, &several, &PyTuple_Type, &arguments, &PyDict_Type,
                        &keywords, &PyTuple_Type, &examples, &PyTuple_Type, &numbers, &PyTuple_Type, &results,
                        &PyTuple_Type, &dead, &line))
    return nullptr;
  HANDLE_TH_ERRORS
  register_observer();
  Known known;
  std::vector<int> inputs, outputs, freed;
  if (!read_numbers(numbers, inputs) || !read_numbers(results, outputs) || !read_numbers(dead, freed)) return nullptr;
  for (size_t i = 0; i < inputs.size(); i++) {
    PyObject* one = PyTuple_GetItem(examples, i);
    if (one == nullptr || !THPVariable_Check(one)) Py_RETURN_NONE;
    known.add(THPVariable_Unpack(one), inputs[i]);
  }
  Observation now;
  now.goes_on = several;
  PyObject* returned;
  {
    c10::impl::IncludeDispatchKeyGuard observing(OBSERVING);
    Observation* outer = observation;
    observation = &now;
    returned = PyObject_Call(function, arguments, keywords);
    observation = outer;
  }
  THPObjectPtr returned_is_freed(returned);
  PyErr_Clear();
  for (const auto& call : now.calls)  // another library may take its operators back
    if (call.op.schema().name().rfind("aten::", 0) != 0) Py_RETURN_NONE;
  if (now.calls.empty() || now.failed || (returned != nullptr) != static_cast<bool>(several)) Py_RETURN_NONE;
  if (name != nullptr && (now.calls.size() > 1 || !is_named(now.calls[0].op.schema().name(), name))) Py_RETURN_NONE;
  auto made = std::make_unique<Line>();
  made->number = line;
  int temporary = TEMPORARY;
  for (const auto& call : now.calls) {
    made->instructions.push_back({call.op, nullptr});
    auto& instruction = made->instructions.back();
    if (!read_arguments(call.arguments, known, instruction)) Py_RETURN_NONE;
    for (const auto& result : call.results) {
      if (!result.isTensor()) continue;
      known.add(result.toTensor(), temporary);
      instruction.results.push_back(temporary--);
    }
  }
  for (size_t i = 0; i < inputs.size(); i++)
    if (!known.read[i]) Py_RETURN_NONE;
  if (several ? !take_returned(returned, now.calls, outputs, made->instructions)
              : !take_results(now.calls[0], outputs, made->instructions[0]))
    Py_RETURN_NONE;
  for (int number = TEMPORARY; number > temporary; number--) freed.push_back(number);
  for (int number : freed)
    if (!mark_last(made->instructions, number)) made->instructions.back().dead.push_back(number);
  return PyCapsule_New(made.release(), LINE, forget_line);
  END_HANDLE_TH_ERRORS
}

// kernels(address, inputs, outputs, shared, own, otherwise, arguments, results, dead, line): a call of a region's kernels.
// inputs, outputs: a tuple of (sizes, strides, dtype) for each. otherwise: a function of the inputs that returns the
// results as a list. arguments, results, dead: numbers.
inline bool read_forms(PyObject* given, std::vector<Kernels::Form>& into) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
    PyObject *sizes, *strides, *dtype;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, i), "O!O!O!", &PyTuple_Type, &sizes, &PyTuple_Type, &strides,
                          &THPDtypeType, &dtype))
      return false;
    into.push_back({{}, {}, reinterpret_cast<THPDtype*>(dtype)->scalar_type});
    for (auto [from, to] : {std::pair{sizes, &into.back().sizes}, {strides, &into.back().strides}})
      for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(from); k++) to->push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(from, k)));
  }
  return !PyErr_Occurred();
}

inline PyObject* kernels(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject *inputs, *outputs, *otherwise, *arguments, *results, *dead;
  unsigned long long address;
  long long shared, own;
  int line;
  if (!PyArg_ParseTuple(given, "KO!O!LLOO!O!O!i", &address, &PyTuple_Type, &inputs, &PyTuple_Type, &outputs, &shared, &own,
                        &otherwise, &PyTuple_Type, &arguments, &PyTuple_Type, &results, &PyTuple_Type, &dead, &line))
    return nullptr;
  auto called = std::make_shared<Kernels>();
  called->function = reinterpret_cast<void (*)(char* const*, int, int*)>(address);
  called->shared = shared;
  called->own = own;
  called->otherwise = Py_NewRef(otherwise);
  std::vector<int> read, freed;
  auto made = std::make_unique<Line>();
  made->number = line;
  made->instructions.push_back({std::nullopt, called});
  auto& instruction = made->instructions.back();
  if (!read_forms(inputs, called->inputs) || !read_forms(outputs, called->outputs) || !read_numbers(arguments, read) ||
      !read_numbers(results, instruction.results) || !read_numbers(dead, freed))
    return nullptr;
  for (int number : read) instruction.arguments.push_back({Argument::ONE, {Value{number, false, {}}}});
  for (int number : freed)
    if (!mark_last(made->instructions, number)) instruction.dead.push_back(number);
  return PyCapsule_New(made.release(), LINE, forget_line);
  END_HANDLE_TH_ERRORS
}

// Calls a function, the operators of which no profiler sees.
inline PyObject* unseen(PyObject*, PyObject* function) {
  at::DisableRecordFunctionGuard quiet;
  return PyObject_CallNoArgs(function);
}

// ----------------------------------------------------------------------------------------------------------- the loop
// A step is compact, so that a thousand of them stay in a cache: its codes are arguments, results and values to free.

enum Code : uint32_t { COPY, MOVE, CONSTANT, TENSORS, OPTIONAL_TENSORS };  // with a slot, an index, or a length
constexpr int CODE_BITS = 3;
constexpr uint32_t UNUSED = ~0u;

struct Step {
  std::optional<c10::OperatorHandle> op;
  const Kernels* kernels;
  uint32_t codes;  // the index of its first one
  uint16_t arguments, results, dead;
  bool results_in_a_list;
  int32_t line;
};

struct Loop {
  std::vector<Step> steps;
  std::vector<uint32_t> codes;
  std::vector<c10::IValue> constants;
  std::vector<std::shared_ptr<Kernels>> kernels;
  size_t slots = 0, inputs = 0, most_values = 0;
  std::vector<uint32_t> outputs;
  std::vector<std::pair<int, uint32_t>> released;  // places of inputs, and the step behind which the list holds none
  std::string file, name;
  PyObject* otherwise = nullptr;
  ~Loop() { Py_XDECREF(otherwise); }
};

inline const char* const LOOP = "thunder.Loop";

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

struct WithGil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithGil() { PyGILState_Release(state); }
};

inline int64_t milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

constexpr int64_t SIGNALS = 50;  // milliseconds after which a loop looks for signals, as Python does between lines

inline c10::IValue take(const Loop& loop, uint32_t code, c10::IValue* values) {
  const uint32_t index = code >> CODE_BITS;
  switch (code & ((1u << CODE_BITS) - 1)) {
    case COPY: return values[index];
    case MOVE: return std::move(values[index]);
    default: return loop.constants[index];
  }
}

// Pushes an argument, and returns the codes behind it.
inline const uint32_t* push(const Loop& loop, Stack& stack, const uint32_t* code, c10::IValue* values) {
  const uint32_t kind = *code & ((1u << CODE_BITS) - 1), length = *code >> CODE_BITS;
  if (kind == TENSORS) {
    c10::List<at::Tensor> list;
    list.reserve(length);
    for (uint32_t i = 0; i < length; i++) list.push_back(take(loop, *++code, values).toTensor());
    stack.emplace_back(std::move(list));
  } else if (kind == OPTIONAL_TENSORS) {
    c10::List<std::optional<at::Tensor>> list;
    list.reserve(length);
    for (uint32_t i = 0; i < length; i++) list.push_back(take(loop, *++code, values).toOptional<at::Tensor>());
    stack.emplace_back(std::move(list));
  } else {
    stack.push_back(take(loop, *code, values));
  }
  return code + 1;
}

// What a region returns for these inputs, by Python.
inline void run_region(const Kernels& kernels, Stack& stack) {
  WithGil held;
  auto failed = [] {
    python_error error;
    error.persist();
    throw error;
  };
  THPObjectPtr arguments(PyTuple_New(stack.size()));
  for (size_t i = 0; arguments && i < stack.size(); i++) {
    PyObject* one = THPVariable_Wrap(stack[i].toTensor());
    if (one == nullptr) failed();
    PyTuple_SET_ITEM(arguments.get(), i, one);
  }
  THPObjectPtr results(arguments ? PyObject_CallObject(kernels.otherwise, arguments) : nullptr);
  if (!results) failed();
  TORCH_CHECK(PyList_Check(results.get()) && static_cast<size_t>(PyList_GET_SIZE(results.get())) == kernels.outputs.size(),
              "a region returns the list of its results");
  stack.clear();
  for (size_t i = 0; i < kernels.outputs.size(); i++)
    stack.emplace_back(THPVariable_Unpack(PyList_GET_ITEM(results.get(), i)));
}

// Takes inputs from the stack, and leaves results there.
inline void run_kernels(const Kernels& kernels, Stack& stack) {
  for (size_t i = 0; i < stack.size(); i++)
    if (!kernels.inputs[i].fits(stack[i].toTensor())) return run_region(kernels, stack);
  c10::SmallVector<char*, 16> addresses;
  for (const auto& x : stack) addresses.push_back(static_cast<char*>(x.toTensor().data_ptr()));
  c10::SmallVector<at::Tensor, 8> results;
  for (const auto& form : kernels.outputs) {
    results.push_back(at::detail::empty_strided_cpu(form.sizes, form.strides, form.dtype));
    addresses.push_back(static_cast<char*>(results.back().data_ptr()));
  }
  const int threads = at::get_num_threads();
  at::Tensor scratch;
  if (kernels.shared + kernels.own > 0) scratch = at::empty({kernels.shared + kernels.own * threads}, at::kByte);
  addresses.push_back(scratch.defined() ? static_cast<char*>(scratch.data_ptr()) : nullptr);
  addresses.push_back(nullptr);  // sizes
  addresses.push_back(nullptr);  // floats
  int status = 0;
  kernels.function(addresses.data(), threads, &status);
  if (status != 0) return run_region(kernels, stack);
  stack.clear();
  for (auto& x : results) stack.emplace_back(std::move(x));
}

// Whether all steps ran; `line` is that of the last one. False where a signal handler raised.
inline bool run_steps(const Loop& loop, c10::IValue* values, PyObject* inputs, int& line) {
  Stack stack;
  stack.reserve(loop.most_values);
  int64_t looked = milliseconds();
  size_t released = 0;
  for (size_t at = 0; at < loop.steps.size(); at++) {
    const Step& step = loop.steps[at];
    line = step.line;
    const uint32_t* code = &loop.codes[step.codes];
    for (int i = 0; i < step.arguments; i++) code = push(loop, stack, code, values);
    if (step.kernels != nullptr) run_kernels(*step.kernels, stack);
    else step.op->callBoxed(stack);
    if (step.results_in_a_list) {
      auto list = stack[0].toTensorVector();
      for (int i = 0; i < step.results; i++)
        if (code[i] != UNUSED) values[code[i]] = std::move(list.at(i));
    } else {
      for (int i = 0; i < step.results; i++)
        if (code[i] != UNUSED) values[code[i]] = std::move(stack[i]);
    }
    stack.clear();
    code += step.results;
    for (int i = 0; i < step.dead; i++) values[code[i]] = c10::IValue();
    if (released < loop.released.size() && loop.released[released].second == at) {
      WithGil held;
      for (; released < loop.released.size() && loop.released[released].second == at; released++)
        PyList_SetItem(inputs, loop.released[released].first, Py_NewRef(Py_None));
    }
    const int64_t now = milliseconds();
    if (now - looked > SIGNALS) {
      looked = now;
      WithGil held;
      if (PyErr_CheckSignals() != 0) return false;
    }
  }
  return true;
}

inline PyObject* run_loop(const Loop& loop, PyObject* inputs, int& line) {
  HANDLE_TH_ERRORS
  std::vector<c10::IValue> values(loop.slots);
  for (size_t i = 0; i < loop.inputs; i++) values[i] = THPVariable_Unpack(PyList_GET_ITEM(inputs, i));
  {
    WithoutGil released;
    if (!run_steps(loop, values.data(), inputs, line)) return nullptr;
  }
  line = 0;
  if (PyList_SetSlice(inputs, 0, PyList_GET_SIZE(inputs), nullptr) != 0) return nullptr;
  if (loop.outputs.size() == 1) return THPVariable_Wrap(std::move(values[loop.outputs[0]]).toTensor());
  PyObject* results = PyTuple_New(loop.outputs.size());
  for (size_t i = 0; results != nullptr && i < loop.outputs.size(); i++) {
    PyObject* one = THPVariable_Wrap(std::move(values[loop.outputs[i]]).toTensor());
    if (one == nullptr) Py_CLEAR(results);
    else PyTuple_SET_ITEM(results, i, one);
  }
  return results;
  END_HANDLE_TH_ERRORS
}

// The traceback of an error begins at the line of the printed program whose operator has raised.
inline void add_line(const Loop& loop, int line) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyCodeObject* code = PyCode_NewEmpty(loop.file.c_str(), loop.name.c_str(), line);
  PyObject* globals = PyDict_New();
  PyFrameObject* frame =
      code != nullptr && globals != nullptr ? PyFrame_New(PyThreadState_Get(), code, globals, nullptr) : nullptr;
  PyErr_Restore(type, value, traceback);
  if (frame != nullptr) PyTraceBack_Here(frame);
  Py_XDECREF(frame);
  Py_XDECREF(code);
  Py_XDECREF(globals);
}

// The inputs stand in a list, which the loop empties as they die. `otherwise` runs where one of them is of a subclass.
inline PyObject* call_loop(PyObject* self, PyObject* inputs) {
  const auto& loop = *static_cast<Loop*>(PyCapsule_GetPointer(self, LOOP));
  if (!PyList_Check(inputs) || static_cast<size_t>(PyList_GET_SIZE(inputs)) != loop.inputs) {
    PyErr_SetString(PyExc_TypeError, "a loop takes the list of its inputs");
    return nullptr;
  }
  for (size_t i = 0; i < loop.inputs; i++)
    if (!THPVariable_CheckExact(PyList_GET_ITEM(inputs, i))) return PyObject_CallOneArg(loop.otherwise, inputs);
  int line = 0;
  PyObject* result = run_loop(loop, inputs, line);
  if (result == nullptr && line > 0) add_line(loop, line);
  return result;
}

inline PyMethodDef loop_definition = {"loop", call_loop, METH_O, nullptr};

inline void forget_loop(PyObject* capsule) { delete static_cast<Loop*>(PyCapsule_GetPointer(capsule, LOOP)); }

// Writes lines as steps. slots: of the numbers of values.
struct Writer {
  Loop& loop;
  const std::vector<int>& slots;

  uint32_t slot(int number) {
    if (number == NONE) return UNUSED;
    const size_t at = number <= TEMPORARY ? temporaries + (TEMPORARY - number) : slots.at(number);
    loop.slots = std::max(loop.slots, at + 1);
    return at;
  }

  uint32_t constant(const c10::IValue& x) {
    for (size_t i = 0; i < loop.constants.size(); i++) {
      const auto& y = loop.constants[i];
      if (x.isNone() && y.isNone() || x.isInt() && y.isInt() && x.toInt() == y.toInt() ||
          x.isBool() && y.isBool() && x.toBool() == y.toBool())
        return i;
    }
    loop.constants.push_back(x);
    return loop.constants.size() - 1;
  }

  void value(const Value& x) {
    loop.codes.push_back(x.number == NONE ? constant(x.constant) << CODE_BITS | CONSTANT
                                          : slot(x.number) << CODE_BITS | (x.last ? MOVE : COPY));
  }

  void line(const Line& line) {
    for (const auto& x : line.instructions) {
      const bool in_a_list = x.op && is_list(x.op->schema());
      const size_t returned = x.op ? x.op->schema().returns().size() : x.results.size();
      if (x.kernels) loop.kernels.push_back(x.kernels);
      loop.steps.push_back({x.op, x.kernels.get(), static_cast<uint32_t>(loop.codes.size()),
                            static_cast<uint16_t>(x.arguments.size()), static_cast<uint16_t>(x.results.size()),
                            static_cast<uint16_t>(x.dead.size()), in_a_list, line.number});
      for (const auto& argument : x.arguments) {
        if (argument.kind != Argument::ONE)
          loop.codes.push_back(argument.values.size() << CODE_BITS |
                               (argument.kind == Argument::TENSORS ? TENSORS : OPTIONAL_TENSORS));
        for (const auto& one : argument.values) value(one);
      }
      for (int number : x.results) loop.codes.push_back(slot(number));
      for (int number : x.dead) loop.codes.push_back(slot(number));
      loop.most_values = std::max({loop.most_values, x.arguments.size(), returned});
    }
  }

  size_t temporaries = 0;  // the first slot behind those of numbers
};

// loop_of(lines, slots, inputs, outputs, released, file, name, otherwise): a function of the list of its inputs, which
// it empties, that returns the one output or a tuple of them. slots: of the values, by number; inputs: how many, which
// have the first slots; outputs: numbers. released: pairs of the place of an input and the index of a line, in the
// order of these, behind which the list holds the input no more.
inline PyObject* loop_of(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject *lines, *slots, *outputs, *released, *otherwise;
  const char *file, *name;
  Py_ssize_t inputs;
  if (!PyArg_ParseTuple(given, "O!O!nO!O!ssO", &PyTuple_Type, &lines, &PyTuple_Type, &slots, &inputs, &PyTuple_Type,
                        &outputs, &PyTuple_Type, &released, &file, &name, &otherwise))
    return nullptr;
  auto made = std::make_unique<Loop>();
  std::vector<int> of_numbers, returned;
  if (!read_numbers(slots, of_numbers) || !read_numbers(outputs, returned)) return nullptr;
  made->inputs = made->slots = inputs;
  made->file = file;
  made->name = name;
  Writer writer{*made, of_numbers};
  for (int slot : of_numbers) writer.temporaries = std::max(writer.temporaries, static_cast<size_t>(slot + 1));
  std::vector<uint32_t> last_step;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(lines); i++) {
    auto* one = static_cast<Line*>(PyCapsule_GetPointer(PyTuple_GET_ITEM(lines, i), LINE));
    if (one == nullptr) return nullptr;
    writer.line(*one);
    last_step.push_back(made->steps.size() - 1);
  }
  for (int number : returned) made->outputs.push_back(writer.slot(number));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(released); i++) {
    int place, behind;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(released, i), "ii", &place, &behind)) return nullptr;
    made->released.emplace_back(place, last_step.at(behind));
  }
  made->otherwise = Py_NewRef(otherwise);
  PyObject* capsule = PyCapsule_New(made.release(), LOOP, forget_loop);
  PyObject* function = capsule == nullptr ? nullptr : PyCFunction_New(&loop_definition, capsule);
  Py_XDECREF(capsule);
  return function;
  END_HANDLE_TH_ERRORS
}

}  // namespace launch_loop
