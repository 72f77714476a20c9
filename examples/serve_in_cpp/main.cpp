// Runs a program that `thunder.export(model, "model.pt2", *args, format="aot_inductor")` wrote, without Python.
//
//     serve model.pt2 inputs.pt outputs.pt
//
// inputs.pt: a list of tensors, written by torch.save. outputs.pt: the tuple of the program's results, for
// torch.load.
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: " << argv[0] << " PROGRAM INPUTS OUTPUTS\n";
    return 2;
  }
  c10::InferenceMode without_autograd;
  std::ifstream file(argv[2], std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  at::IValue saved_inputs = torch::jit::pickle_load(bytes);
  std::vector<at::Tensor> inputs;
  for (const at::IValue& input : saved_inputs.toListRef()) inputs.push_back(input.toTensor());

  torch::inductor::AOTIModelPackageLoader program(argv[1]);
  std::vector<at::Tensor> outputs = program.run(inputs);

  std::vector<at::IValue> results(outputs.begin(), outputs.end());
  std::vector<char> saved = torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(results)));
  std::ofstream(argv[3], std::ios::binary).write(saved.data(), static_cast<std::streamsize>(saved.size()));
  return 0;
}
