// The kernels of native.cpp as operators of torch, torch.ops.tread, with their gradients.
//
// A kernel runs for plain CPU tensors of float32 or bfloat16. For other inputs (float64, a compiler's
// tensors without memory, a mode that counts operations) the first six operators evaluate their
// formula in torch's operations, so that compilers can fuse it; the others are only called if `takes`
// returns true.
//
// A pair of kernels is called as in native.cpp: forward(inputs, tables and sizes, result, tensors saved
// for backward, threads) and backward(gradient, inputs, saved tensors, tables and sizes, gradients of
// the inputs, threads), with contiguous tensors.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/library.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

// From ATen/autocast_mode.h, which includes every operator of torch: a fifth of the build.
namespace at::autocast {
TORCH_API bool is_autocast_enabled(at::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

using at::Tensor;
using at::TensorList;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Entry = void (*)();  // of a kernel, in native.cpp

#define PAIR(name)                                                         \
  extern "C" Entry name##_forward_float32, name##_forward_bfloat16;        \
  extern "C" Entry name##_backward_float32, name##_backward_bfloat16;      \
  const Pair name##_pair{{&name##_forward_float32, &name##_forward_bfloat16}, \
                         {&name##_backward_float32, &name##_backward_bfloat16}};

struct Pair {
  Entry *forward[2], *backward[2];
};
PAIR(gelu)
PAIR(squared_relu)
PAIR(sigmoid_gate)
PAIR(adaln)
PAIR(gated_sum)
PAIR(gated_rms)
PAIR(conv)
PAIR(shift_mix)
PAIR(biwkv)
PAIR(ssd)

namespace {

constexpr double EPS = 1e-6;  // as in native.py

// ---------------------------------------------------------------- calling a kernel

void* raw(const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; }
void* const* raw(const std::vector<void*>& list) { return list.data(); }
float raw(float value) { return value; }
int64_t raw(int64_t value) { return value; }

template <class... Values>
void call(Entry* const (&kernels)[2], at::ScalarType type, const Values&... values) {
  auto kernel = reinterpret_cast<void (*)(decltype(raw(values))..., int64_t)>(
      *kernels[type == at::kBFloat16]);
  kernel(raw(values)..., int64_t(at::get_num_threads()));
}

std::vector<void*> pointers(const variable_list& tensors) {
  std::vector<void*> list;
  for (auto& t : tensors) list.push_back(t.data_ptr());
  return list;
}

// A tensor that is zero or negated only by a flag has no memory, or other numbers in it.
Tensor dense(const Tensor& t) { return (t._is_zerotensor() || t.is_neg() ? t.clone() : t).contiguous(); }

// The backward pass of a call: `back(gradients, saved, gradients of the saved inputs)`.
using Back = std::function<void(const variable_list&, const variable_list&, variable_list&)>;
struct Kept : torch::CustomClassHolder {
  Back back;
  size_t inputs;
  bool stream;
};

// Puts computed results into the autograd graph. `inputs` get a gradient; with `stream`, the result is
// a sum with the first of them, which gets the result's gradient unchanged.
struct Kernel : torch::autograd::Function<Kernel> {
  struct Work {
    variable_list results, kept, inputs;
    Back back;
    bool stream = false;
  };

  // `defined` are the inputs without undefined tensors, which the graph cannot hold.
  static variable_list forward(AutogradContext* ctx, const Work& work, TensorList defined) {
    variable_list saved(work.inputs.begin() + work.stream, work.inputs.end());
    auto kept = c10::make_intrusive<Kept>();
    kept->back = work.back, kept->inputs = saved.size(), kept->stream = work.stream;
    ctx->saved_data["kept"] = c10::IValue::make_capsule(kept);
    saved.insert(saved.end(), work.kept.begin(), work.kept.end());
    ctx->save_for_backward(saved);
    return work.results;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    auto kept = c10::static_intrusive_pointer_cast<Kept>(ctx->saved_data["kept"].toCapsule());
    variable_list saved = ctx->get_saved_variables(), ours, out{Tensor()};
    for (auto& grad : grads) grad = dense(grad);
    for (auto& t : saved)  // a saved-tensor hook may return another tensor
      if (t.defined()) t = dense(t);
    for (size_t i = 0; i < kept->inputs; i++)
      ours.push_back(saved[i].defined() ? at::empty_like(saved[i]) : Tensor());
    kept->back(grads, saved, ours);
    if (kept->stream) out.push_back(grads[0]);
    for (auto& grad : ours)
      if (grad.defined()) out.push_back(grad);
    if (!at::GradMode::is_enabled()) return out;
    // As Python's decorator once_differentiable: differentiating these again is an error.
    for (auto& grad : out)
      if (grad.defined()) grad = grad.detach().set_requires_grad(true);
    return (*std::make_shared<torch::autograd::DelayedError>(
        "a kernel of backbones.ops.native is once_differentiable", out.size()))(std::move(out));
  }
};

variable_list run(const variable_list& results, const variable_list& kept, const variable_list& inputs, Back back,
                  bool stream = false) {
  variable_list defined;
  for (auto& input : inputs)
    if (input.defined()) defined.push_back(input);
  return Kernel::apply(Kernel::Work{results, kept, inputs, std::move(back), stream}, TensorList(defined));
}

// ---------------------------------------------------------------- which tensors kernels take

bool plain(const Tensor& t) {
  constexpr c10::DispatchKeySet odd({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                     c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor,
                                     c10::DispatchKey::FuncTorchBatched,
                                     c10::DispatchKey::FuncTorchGradWrapper});
  return t.is_cpu() && t.layout() == at::kStrided && !t.key_set().has_any(odd);
}

bool half_or_single(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16; }

// Type of the matmuls of tokens with a type: autocast's where it is on.
at::ScalarType matmul_type(at::ScalarType type) {
  return at::autocast::is_autocast_enabled(at::kCPU) ? at::autocast::get_autocast_dtype(at::kCPU) : type;
}

// Tokens of one type.
bool takes(TensorList tensors) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  auto type = tensors[0].scalar_type();
  for (auto& t : tensors)
    if (!plain(t) || t.scalar_type() != type) return false;
  return half_or_single(type) && tensors[0].numel();
}

// Whether the kernels that mix tokens take these inputs and their projections; the first are the tokens.
bool takes_all(const std::vector<Tensor>& tensors) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  for (auto& t : tensors)
    if (!plain(t)) return false;
  auto type = tensors[0].scalar_type();
  return half_or_single(type) && half_or_single(matmul_type(type));
}

// A stream (B, T, D) and its rows (B, 1, D), all float32.
bool takes_stream(const Tensor& x, TensorList rows) {
  if (x.scalar_type() != at::kFloat || x.dim() != 3 || !takes({x}) || !takes(rows)) return false;
  for (auto& row : rows)
    if (row.scalar_type() != at::kFloat || row.sizes() != at::IntArrayRef{x.size(0), 1, x.size(2)})
      return false;
  return true;
}

// A scan order: its permutation and the inverse, for all samples or flattened over them.
using Order = optional<std::vector<Tensor>>;

Tensor permuted(const Tensor& x, const Order& order, int which) {
  if (!order) return x;
  const Tensor& index = (*order)[which];
  if (index.sym_numel() == x.sym_size(1)) return x.index_select(1, index);
  return x.flatten(0, 1).index_select(0, index).view_as(x);
}

struct Permutation {
  Tensor index;
  int64_t each = 0;
  Permutation(const Order& order, int64_t tokens) {
    if (!order) return;
    index = (*order)[0];
    each = index.numel() != tokens;
  }
};

// An index table as contiguous int64 with `dims` axes, and whether each sample has a row of its own.
struct Table {
  Tensor index;
  int64_t each = 0;
  Table(const optional<Tensor>& given, int64_t dims) {
    if (!given) return;
    index = (given->dim() == dims ? *given : given->unsqueeze(0)).to(at::kLong).contiguous();
    each = index.size(0) > 1;
  }
};

Tensor floats(at::IntArrayRef shape) { return at::empty(shape, at::kFloat); }

// ---------------------------------------------------------------- value by value

Tensor pointwise(const Pair& pair, variable_list inputs) {
  for (auto& x : inputs) x = x.contiguous();
  auto type = inputs[0].scalar_type();
  int64_t n = inputs[0].numel();
  Tensor out = at::empty_like(inputs[0]);
  if (inputs.size() == 1) {
    call(pair.forward, type, inputs[0], n, out);
    return run({out}, {}, inputs, [=, &pair](auto& grads, auto& saved, auto& ours) {
      call(pair.backward, type, grads[0], saved[0], n, ours[0]);
    })[0];
  }
  call(pair.forward, type, inputs[0], inputs[1], n, out);
  return run({out}, {}, inputs, [=, &pair](auto& grads, auto& saved, auto& ours) {
    call(pair.backward, type, grads[0], saved[0], saved[1], n, ours[0], ours[1]);
  })[0];
}

Tensor gelu(const Tensor& x) { return takes({x}) ? pointwise(gelu_pair, {x}) : at::gelu(x, "tanh"); }

Tensor squared_relu(const Tensor& x) {
  return takes({x}) ? pointwise(squared_relu_pair, {x}) : x.relu().square();
}

Tensor sigmoid_gate(const Tensor& x, const Tensor& y) {
  return takes({x, y}) && x.sizes() == y.sizes() ? pointwise(sigmoid_gate_pair, {x, y}) : x.sigmoid().mul(y);
}

// ---------------------------------------------------------------- adaLN and the gated residual

Tensor adaln(const Tensor& given, const Tensor& shift_rows, const Tensor& scale_rows, const Order& order) {
  if (!takes_stream(given, {shift_rows, scale_rows})) {
    Tensor unit = at::layer_norm_symint(given, {given.sym_size(-1)}, {}, {}, EPS);
    return permuted(at::addcmul(shift_rows, unit, scale_rows.add(1)), order, 0);
  }
  auto type = matmul_type(at::kFloat);
  if (!half_or_single(type)) type = at::kFloat;
  Tensor x = given.contiguous(), shift = shift_rows, scale = scale_rows;
  if (shift.stride(0) != scale.stride(0) || shift.stride(2) != 1 || scale.stride(2) != 1)
    shift = shift.contiguous(), scale = scale.contiguous();
  int64_t stride = shift.stride(0), B = x.size(0), T = x.size(1), C = x.size(2);
  Permutation perm(order, T);
  Tensor mean = floats({B, T}), rstd = floats({B, T}), out = at::empty(x.sizes(), type);
  call(adaln_pair.forward, type, x, shift, scale, stride, float(EPS), perm.index, perm.each, B, T, C, out, mean, rstd);
  return run({out}, {mean, rstd}, {x, shift, scale}, [=](auto& grads, auto& saved, auto& ours) {
    call(adaln_pair.backward, type, grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[2].stride(0), float(EPS),
         perm.index, perm.each, B, T, C, ours[0], ours[1], ours[2]);
  })[0];
}

Tensor gated_sum(const Tensor& given, const Tensor& gate_rows, const Tensor& branch, const Order& order) {
  auto type = branch.scalar_type();
  // Check `plain` first: reading a compiler's symbolic sizes would specialise them.
  if (!half_or_single(type) || !plain(branch) || !takes_stream(given, {gate_rows}) || branch.sizes() != given.sizes())
    return at::addcmul(given, gate_rows.to(given.scalar_type()), permuted(branch, order, 1).to(given.scalar_type()));
  Tensor x = given.contiguous(), y = branch.contiguous();
  Tensor gate = gate_rows.stride(2) == 1 ? gate_rows : gate_rows.contiguous(), out = at::empty_like(x);
  int64_t stride = gate.stride(0), B = x.size(0), T = x.size(1), C = x.size(2);
  Permutation perm(order, T);
  call(gated_sum_pair.forward, type, x, gate, y, stride, perm.index, perm.each, B, T, C, out);
  return run({out}, {}, {x, gate, y}, [=](auto& grads, auto& saved, auto& ours) {
    call(gated_sum_pair.backward, type, grads[0], saved[0], saved[1], saved[0].stride(0), perm.index, perm.each, B, T, C,
         ours[0], ours[1]);
  }, true)[0];
}

Tensor gated_rms_norm(const Tensor& branch, const Tensor& gate, const Tensor& weights) {
  auto type = branch.scalar_type();
  if (!takes({branch, gate}) || !plain(weights) || gate.sizes() != branch.sizes() ||
      weights.sizes() != branch.sizes().slice(branch.dim() - 1))
    return at::rms_norm_symint(branch.mul(at::silu(gate)), weights.sym_sizes(), weights.to(type), EPS);
  Tensor y = branch.contiguous(), z = gate.contiguous(), weight = weights.to(at::kFloat).contiguous();
  int64_t C = y.size(-1), rows = y.numel() / C;
  Tensor out = at::empty_like(y), scale = floats({rows});
  call(gated_rms_pair.forward, type, y, z, weight, float(EPS), rows, C, out, scale);
  return run({out}, {scale}, {y, z, weight}, [=](auto& grads, auto& saved, auto& ours) {
    call(gated_rms_pair.backward, type, grads[0], saved[0], saved[1], saved[2], saved[3], float(EPS), rows, C,
         ours[0], ours[1], ours[2]);
  })[0];
}

// ---------------------------------------------------------------- tokens with others

// Index (1 or B, W - 1, T) of the token 1 to W - 1 steps before each token on its path; T if it is absent.
Tensor tap_indices(const Tensor& positions, int64_t W) {
  int64_t T = positions.size(1);
  Tensor index = at::empty({positions.size(0), W - 1, T}, at::kLong).fill_(T);
  for (int64_t sample = 0; sample < positions.size(0); sample++) {
    const int64_t* at = positions.const_data_ptr<int64_t>() + sample * T;
    int64_t* into = index.mutable_data_ptr<int64_t>() + sample * (W - 1) * T;
    for (int64_t t = 0; t < T; t++)  // Positions ascend: fewer than W tokens are within W - 1 steps.
      for (int64_t source = t - 1; source >= 0 && at[t] - at[source] < W; source--)
        into[(at[t] - at[source] - 1) * T + t] = source;
  }
  return index;
}

// `conv.causal_conv`; the kernel has a row of weights for each distance, 0 first.
Tensor conv(const Tensor& given, const Tensor& weight, const optional<Tensor>& bias_given,
            const optional<Tensor>& positions, bool silu) {
  auto type = given.scalar_type();
  Tensor x = dense(given), rows = dense(weight.t().flip(0).to(at::kFloat));
  Tensor bias = bias_given ? dense(bias_given->to(at::kFloat)) : Tensor(), out = at::empty_like(x);
  int64_t B = x.size(0), T = x.size(1), C = x.size(2), W = rows.size(0), active = silu;
  Table table(positions, 2);
  if (positions) table.index = tap_indices(table.index, W);
  call(conv_pair.forward, type, x, rows, bias, table.index, table.each, active, B, T, C, W, out);
  return run({out}, {}, {x, rows, bias}, [=](auto& grads, auto& saved, auto& ours) {
    call(conv_pair.backward, type, grads[0], saved[0], saved[1], saved[2], table.index, table.each, active, B, T, C,
         W, ours[0], ours[1], ours[2]);
  })[0];
}

// x mix + shifted (1 - mix) for rows of `mix` (M, C).
std::vector<Tensor> shift_mix(const Tensor& given, const Tensor& neighbours, const Tensor& mixes) {
  auto type = given.scalar_type();
  Tensor x = dense(given), mix = dense(mixes.to(at::kFloat));
  Table table(neighbours, 3);
  int64_t B = x.size(0), T = x.size(1), C = x.size(2), M = mix.size(0);
  variable_list out;
  for (int64_t m = 0; m < M; m++) out.push_back(at::empty_like(x));
  call(shift_mix_pair.forward, type, x, mix, table.index, table.each, B, T, C, M, pointers(out));
  return run(out, {}, {x, mix}, [=](auto& grads, auto& saved, auto& ours) {
    call(shift_mix_pair.backward, type, pointers(grads), saved[0], saved[1], table.index, table.each, B, T, C, M,
         ours[0], ours[1]);
  });
}

// `biwkv.biwkv` on decay w / length and bonus exp(u / length), both float32 (C,).
Tensor biwkv(const Tensor& k_given, const Tensor& v_given, const Tensor& decay_given, const Tensor& bonus_given,
             const optional<Tensor>& positions, int64_t length) {
  auto type = v_given.scalar_type();
  Tensor k = dense(k_given), v = dense(v_given);
  Tensor decay = dense(decay_given), bonus = dense(bonus_given), out = at::empty_like(v);
  Table place(positions, 2);
  int64_t B = k.size(0), T = k.size(1), C = k.size(2);
  variable_list kept(4);
  if (at::GradMode::is_enabled())
    kept = {type == at::kFloat ? out.detach() : floats(v.sizes()), floats(v.sizes()), floats(v.sizes()), floats({B, C})};
  call(biwkv_pair.forward, type, k, v, decay, bonus, place.index, place.each, length, B, T, C, out, kept[0], kept[1],
       kept[2], kept[3]);
  return run({out}, kept, {k, v, decay, bonus}, [=](auto& grads, auto& saved, auto& ours) {
    call(biwkv_pair.backward, type, grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6],
         saved[7], place.index, place.each, length, B, T, C, ours[0], ours[1], ours[2], ours[3]);
  })[0];
}

// SSD on (B, T, H width + 2 N), N a multiple of 8; arguments as of `ssd.ssd`.
Tensor ssd(const Tensor& xbc_given, const Tensor& dt_given, const Tensor& rates, const optional<Tensor>& skip_given,
           const optional<Tensor>& gaps, int64_t width) {
  auto type = xbc_given.scalar_type();
  Tensor xbc = dense(xbc_given), dt = dense(dt_given.to(at::kFloat)), steps = dt;
  if (gaps) steps = dt.mul(gaps->to(at::kFloat).expand({dt.size(0), dt.size(1)}).unsqueeze(-1));
  Tensor decay = dense(steps.mul(rates.to(at::kFloat)));
  Tensor skip = skip_given ? dense(skip_given->to(at::kFloat)) : Tensor();
  int64_t B = dt.size(0), T = dt.size(1), H = dt.size(2), N = (xbc.size(2) - H * width) / 2;
  Tensor out = at::empty({B, T, H, width}, type), exact = type == at::kFloat ? out.detach() : floats(out.sizes());
  call(ssd_pair.forward, type, xbc, dt, decay, skip, B, T, H, width, N, out, exact);
  return run({out}, {exact}, {xbc, dt, decay, skip}, [=](auto& grads, auto& saved, auto& ours) {
    call(ssd_pair.backward, type, grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], B, T, H, width, N,
         ours[0], ours[1], ours[2], ours[3]);
  })[0];
}

}  // namespace

TORCH_LIBRARY(tread, library) {
  library.def("takes(Tensor[] tensors) -> bool", &takes_all);
  library.def("gelu(Tensor x) -> Tensor", &gelu);
  library.def("squared_relu(Tensor x) -> Tensor", &squared_relu);
  library.def("sigmoid_gate(Tensor x, Tensor y) -> Tensor", &sigmoid_gate);
  library.def("adaln(Tensor x, Tensor shift, Tensor scale, Tensor[]? order=None) -> Tensor", &adaln);
  library.def("gated_sum(Tensor x, Tensor gate, Tensor y, Tensor[]? order=None) -> Tensor", &gated_sum);
  library.def("gated_rms_norm(Tensor y, Tensor z, Tensor weight) -> Tensor", &gated_rms_norm);
  library.def("conv(Tensor x, Tensor weight, Tensor? bias, Tensor? position, bool silu) -> Tensor", &conv);
  library.def("shift_mix(Tensor x, Tensor neighbours, Tensor mix) -> Tensor[]", &shift_mix);
  library.def("biwkv(Tensor k, Tensor v, Tensor decay, Tensor bonus, Tensor? position, int length) -> Tensor", &biwkv);
  library.def("ssd(Tensor xbc, Tensor dt, Tensor A, Tensor? D, Tensor? decay_gap, int width) -> Tensor", &ssd);
}

// Under torch.func transforms and dispatch modes, `takes` is false: they need single operations.
bool takes_none(const std::vector<Tensor>&) { return false; }
TORCH_LIBRARY_IMPL(tread, FuncTorchDynamicLayerFrontMode, library) { library.impl("takes", &takes_none); }
TORCH_LIBRARY_IMPL(tread, Python, library) { library.impl("takes", &takes_none); }
