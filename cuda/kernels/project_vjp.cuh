// Backward through projection, colours and activation, to the raw parameters and the pose; a chunk a block. Adam takes
// the gradients from shared memory, where the chunk's threads go over its contiguous parameters, so that reads and
// writes of memory are coalesced and no gradient is ever stored. docs/math.md 2 to 4, 6.2 and 8.
#pragma once
#include "adam_group.cuh"
#include "geometry.cuh"

namespace splat {
namespace gpu {

constexpr int kGroups = 6;
constexpr int kShapeNumbers = 3 + 4 + 3 + 1 + 3;  // of a Gaussian without shN
constexpr uint32_t kManyIsects = 32;              // from here on a warp sums a Gaussian's gradients together
constexpr uint32_t kHugeIsects = 1024;            // and from here on the block

struct ProjectVjpJob {
  View<float> view;
  RawArrays gaussians;
  bool antialiased;
  const int32_t* ids;
  const int64_t* chunk_counts;
  const uint32_t* tiles_per_gauss;
  const uint32_t* isect_grad_starts;
  const float* isect_grads;
  const int64_t* counters;
  bool with_adam;
  AdamGroup adam[kGroups];
  MeansRate<float> means_rate;
  int32_t* sh_last_step;      // null: Adam steps shN of invisible Gaussians too
  int32_t step;
  float* gradients[kGroups];  // null where they are not requested
  float* pose_partials;       // null without a pose gradient
  float *grad2d, *count;      // null without statistics
  bool with_abs;              // grad2d adds up the magnitudes of the pixels' gradients
};

// Where the gradients of a chunk lie in shared memory, group by group as in SplatGaussians.
SPLAT_DEVICE constexpr int shape_offset(int group) {
  return SPLAT_CHUNK * (group == 0 ? 0 : group == 1 ? 3 : group == 2 ? 7 : group == 3 ? 10 : 11);
}
SPLAT_DEVICE constexpr int shape_width(int group) { return group == 1 ? 4 : group == 3 ? 1 : 3; }

// The sum of the intersection gradients of one Gaussian, in their order.
SPLAT_DEVICE void sum_isect_grads(const float* isect_grads, int64_t first, uint32_t count, float* sum) {
  for (uint32_t k = 0; k < count; ++k) {
    const float4* grad = reinterpret_cast<const float4*>(isect_grads + (first + k) * kIsectGradSize);
    const float4 a = grad[0], b = grad[1];
    const float4 c = grad[2];
    sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
    sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
    sum[8] += c.x, sum[9] += c.y, sum[10] += c.z, sum[11] += c.w;
  }
}

// The same for the lanes of a warp whose Gaussians have many: one after another, a lane a field, a half of the warp
// every second intersection. The order of the additions is the same, and so are the bits.
SPLAT_DEVICE void sum_many_isect_grads(const float* isect_grads, int64_t first, uint32_t count, bool mine, float* sum) {
  constexpr unsigned kHalf = kIsectGradSize, kAhead = 8;  // loads in flight, of two intersections each
  static_assert(2 * kHalf == kWarp, "half a warp takes the fields of an intersection");
  const unsigned field = lane_id() % kHalf, half = lane_id() / kHalf;
  unsigned waiting = __ballot_sync(kFullWarp, mine);
  for (; waiting != 0; waiting &= waiting - 1) {
    const int owner = __ffs(int(waiting)) - 1;
    const long long start = __shfl_sync(kFullWarp, (long long)(first), owner);
    const unsigned many = __shfl_sync(kFullWarp, unsigned(count), owner);
    const float* at = isect_grads + (start + half) * kIsectGradSize + field;
    float total = 0.0f;  // of the lower half; adding 0 behind the end changes no bit of it, for it is never -0
    for (unsigned k = 0; k < many; k += 2 * kAhead, at += 2 * kAhead * kIsectGradSize) {
      float values[kAhead];
#pragma unroll
      for (unsigned j = 0; j < kAhead; ++j)
        values[j] = field < kIsectGradUsed && k + 2 * j + half < many ? at[2 * j * kIsectGradSize] : 0.0f;
#pragma unroll
      for (unsigned j = 0; j < kAhead; ++j) {
        total += values[j];
        total += __shfl_xor_sync(kFullWarp, values[j], int(kHalf));
      }
    }
    for (int f = 0; f < kIsectGradUsed; ++f) {
      const float value = __shfl_sync(kFullWarp, total, f);
      if (lane_id() == owner) sum[f] = value;
    }
  }
}

// The same for the block: its threads read 128 intersections at a time, and one thread a field adds them. Every thread
// of the block calls it, with the gradients of its Gaussian. Returns where the sums of that Gaussian are in shared
// memory, or null where it has fewer than kHugeIsects or is not among the chunk's first eight that have more.
// room: shared memory for 128 intersections.
SPLAT_DEVICE const float* sum_huge_isect_grads(const float* isect_grads, int64_t first, uint32_t count, float* room) {
  constexpr int kRows = SPLAT_CHUNK / kIsectGradSize, kAhead = 8, kIsectsAtOnce = kRows * kAhead;
  constexpr int kMostHuge = 8;  // Gaussians of a chunk that the block sums
  SPLAT_SHARED(unsigned, votes, SPLAT_CHUNK / kWarp);
  SPLAT_SHARED(int64_t, starts, kMostHuge);
  SPLAT_SHARED(uint32_t, counts, kMostHuge);
  SPLAT_SHARED(float, totals, kMostHuge * kIsectGradSize);
  const unsigned huge = __ballot_sync(kFullWarp, count >= kHugeIsects);
  if (lane_id() == 0) votes[warp_id()] = huge;
  __syncthreads();
  int number = __popc(huge & ((1u << lane_id()) - 1u)), all = 0;
  for (int w = 0; w < SPLAT_CHUNK / kWarp; ++w) {
    if (w < warp_id()) number += __popc(votes[w]);
    all += __popc(votes[w]);
  }
  if (all == 0) return nullptr;
  const bool mine = count >= kHugeIsects && number < kMostHuge;
  if (mine) starts[number] = first, counts[number] = count;
  __syncthreads();
  const int row = int(threadIdx.x) / kIsectGradSize, field = int(threadIdx.x) % kIsectGradSize;
  for (int n = 0; n < all && n < kMostHuge; ++n) {
    const int rows = int(counts[n]);
    const float* at = isect_grads + (starts[n] + row) * kIsectGradSize + field;
    float total = 0.0f;
    for (int k = 0; k < rows; k += kIsectsAtOnce, at += kIsectsAtOnce * kIsectGradSize) {
      float values[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        values[j] = field < kIsectGradUsed && k + row + j * kRows < rows ? at[j * SPLAT_CHUNK] : 0.0f;
      __syncthreads();  // the last ones have been added
#pragma unroll
      for (int j = 0; j < kAhead; ++j) room[j * SPLAT_CHUNK + threadIdx.x] = values[j];
      __syncthreads();
      if (row == 0) {
        for (int r = 0; r < kIsectsAtOnce; ++r) total += room[r * kIsectGradSize + field];
      }
    }
    if (row == 0) totals[n * kIsectGradSize + field] = total;
  }
  __syncthreads();
  return mine ? totals + number * kIsectGradSize : nullptr;
}

// Mean, shape and opacity of one Gaussian; `sums` is the sum of its intersection gradients.
template <bool POSE, bool PINHOLE>
SPLAT_DEVICE void geometry_vjp(const ProjectVjpJob& job, const RawGeometry<float>& raw, const float* sums,
                               RawGeometry<float>& v_raw, float* v_mean2d, ViewGrad<float>* pose) {
  const bool filtered = job.gaussians.filter_3d != nullptr;
  const ProjectedGeometry<float> g = project_geometry<PINHOLE>(job.view, raw, job.antialiased, filtered);
  Conic<float> v_conic;
  float v_log_opacity;
  isect_grad_vjp(sums, g.conic.a, g.conic.b, g.conic.c, v_mean2d, v_conic.a, v_conic.b, v_conic.c, v_log_opacity);
  ViewGrad<float>* const v_view = POSE ? pose : nullptr;
  project_geometry_vjp<PINHOLE>(job.view, raw, g, job.antialiased, filtered, v_mean2d, v_conic, v_log_opacity,
                                sums[kGradDepth], v_raw, v_view);
}

// Colours of Gaussian i: `basis` for the gradient of shN, v_colour for that of all coefficients.
template <int DEGREE, bool POSE>
SPLAT_DEVICE void colours_vjp(const ProjectVjpJob& job, int64_t i, const float* mean, const float* sums, float* basis,
                              float* v_colour, float* v_mean, ViewGrad<float>* pose) {
  float direction[3], sum[3];
  const float inv_length = view_direction(job.view.center, mean, direction);
  sh_basis(DEGREE, direction, basis);
  float shN[ShN<DEGREE>::kNumbers];
  load_shN<DEGREE>(job.gaussians, i, shN);
  sh_sum<DEGREE>(job.gaussians.sh0 + 3 * i, shN, basis, sum);
  for (int c = 0; c < 3; ++c) v_colour[c] = sh_colour_vjp(sum[c], sums[kGradRed + c]);
  if (DEGREE == 0) return;
  float v_basis[ShN<DEGREE>::kRoom], v_direction[3] = {0, 0, 0};
#pragma unroll
  for (int k = 0; k < ShN<DEGREE>::kCount; ++k)
    v_basis[k] = shN[3 * k] * v_colour[0] + shN[3 * k + 1] * v_colour[1] + shN[3 * k + 2] * v_colour[2];
  sh_basis_vjp(DEGREE, direction, v_basis, v_direction);
  view_direction_vjp(direction, inv_length, v_direction, v_mean, POSE ? pose->center : nullptr);
}

// A gradient is written, or used, or both. All threads of the block over the chunk's contiguous numbers of one group.
// rates: factors of the rates of the chunk's means, which are there with a power of means_rate.
template <int GROUP>
SPLAT_DEVICE void finish_shape(const ProjectVjpJob& job, int64_t base, int count, const float* shapes,
                               const float* rates) {
  constexpr int kWidth = shape_width(GROUP);
  const int64_t first = base * kWidth + threadIdx.x;
  const float* grads = shapes + shape_offset(GROUP) + threadIdx.x;
  const int left = count * kWidth - int(threadIdx.x);
  const auto in_use = [=](int k) { return k * SPLAT_CHUNK < left; };
  if (job.gradients[GROUP] != nullptr) {
    for (int k = 0; k < kWidth; ++k)
      if (in_use(k)) job.gradients[GROUP][first + k * SPLAT_CHUNK] = grads[k * SPLAT_CHUNK];
  }
  if (!job.with_adam) return;
  AdamStep<float> step = job.adam[GROUP].step;
  if (GROUP != 2) step.scale_reg = 0.0f;
  if (GROUP != 3) step.opacity_reg = 0.0f;
  const auto at = [=](int k) { return first + k * SPLAT_CHUNK; };
  const bool sized = GROUP == 0 && job.means_rate.power > 0.0f;
  const unsigned thread = threadIdx.x;
  const auto step_size = [=](int k) {
    return sized ? step.step_size * rates[(thread + k * SPLAT_CHUNK) / kWidth] : step.step_size;
  };
  adam_several<kWidth>(job.adam[GROUP], step, at, in_use, step_size, [=](int k) { return grads[k * SPLAT_CHUNK]; });
}

// How a warp goes over shN in use: the numbers of several Gaussians at a time, 32 in a round, the same ones of each for
// a lane in all of them.
template <int DEGREE>
struct ShNRounds {
  static constexpr int kUsed = 3 * ShN<DEGREE>::kCount;
  static constexpr int kGaussians = DEGREE == 1 ? 7 : DEGREE == 2 ? 4 : DEGREE == 3 ? 2 : 1;
  static constexpr int kRounds = (kGaussians * kUsed + kWarp - 1) / kWarp;
};

// A coefficient's gradient is its basis function times the colour's gradient, so only those two are kept.
// Those above DEGREE are not in use: they have no gradient, and Adam leaves them as they are.
// listed: null, or the `count` Gaussians that are stepped.
template <int DEGREE>
SPLAT_DEVICE void adam_shN(const ProjectVjpJob& job, int64_t base, int count, const uint8_t* listed,
                           const float* bases, const float* colours) {
  using Rounds = ShNRounds<DEGREE>;
  constexpr int kRounds = Rounds::kRounds > 0 ? Rounds::kRounds : 1, kUsed = Rounds::kUsed > 0 ? Rounds::kUsed : 1;
  const int width = 3 * job.gaussians.shN_count;
  int gaussian[kRounds], element[kRounds];
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    const int flat = k * kWarp + lane_id();
    gaussian[k] = flat / kUsed, element[k] = flat % kUsed;
  }
  AdamGroup group = job.adam[kGroups - 1];
  group.param += base * width, group.exp_avg += base * width, group.exp_avg_sq += base * width;
  AdamStep<float> step = group.step;
  step.opacity_reg = step.scale_reg = 0.0f;
  constexpr int kStride = SPLAT_CHUNK / kWarp * Rounds::kGaussians;
  for (int first = warp_id() * Rounds::kGaussians; first < count; first += kStride) {
    int local[kRounds];
#pragma unroll
    for (int k = 0; k < kRounds; ++k) {
      const int owner = first + gaussian[k];
      const bool there = gaussian[k] < Rounds::kGaussians && owner < count;
      local[k] = !there ? -1 : listed == nullptr ? owner : int(listed[owner]);
    }
    const auto at = [&](int k) { return local[k] * width + element[k]; };
    const auto in_use = [&](int k) { return local[k] >= 0; };
    const auto grad = [&](int k) {
      return bases[local[k] * ShN<DEGREE>::kRoom + element[k] / 3] * colours[3 * local[k] + element[k] % 3];
    };
    adam_several<kRounds>(group, step, at, in_use, [&](int) { return step.step_size; }, grad);
  }
}

// The gradient of all of shN, of which that above DEGREE is zero.
template <int DEGREE>
SPLAT_DEVICE void store_shN(const ProjectVjpJob& job, int64_t base, int count, const uint8_t* listed,
                            const float* bases, const float* colours) {
  const int width = 3 * job.gaussians.shN_count;
  for (int e = threadIdx.x; e < count * width; e += SPLAT_CHUNK) {
    const int owner = e / width, element = e % width, local = listed == nullptr ? owner : int(listed[owner]);
    const bool in_use = element < ShNRounds<DEGREE>::kUsed;
    job.gradients[kGroups - 1][(base + local) * width + element] =
        in_use ? bases[local * ShN<DEGREE>::kRoom + element / 3] * colours[3 * local + element % 3] : 0.0f;
  }
}

SPLAT_DEVICE void add_statistics(const ProjectVjpJob& job, int64_t i, const float* v_mean2d) {
  if (job.grad2d == nullptr) return;
  const float x = v_mean2d[0] * (0.5f * job.view.width), y = v_mean2d[1] * (0.5f * job.view.height);
  job.grad2d[i] += sqrt_(x * x + y * y);
  job.count[i] += 1.0f;
}

SPLAT_DEVICE void store_pose(const ProjectVjpJob& job, int64_t chunk, const ViewGrad<float>& pose) {
  float* out = job.pose_partials + chunk * SPLAT_POSE;
  for (int k = 0; k < 15; ++k) {
    const float mine = k < 9 ? pose.rotation[k] : k < 12 ? pose.translation[k - 9] : pose.center[k - 12];
    const float all = block_sum(mine);
    if (threadIdx.x == 0) out[k] = all;
  }
}

template <int DEGREE, bool POSE, bool PINHOLE>
__global__ void __launch_bounds__(SPLAT_CHUNK) project_vjp_chunks(ProjectVjpJob job) {
  if (overflowed(job.counters)) return;
  constexpr int kRoom = ShN<DEGREE>::kRoom;
  SPLAT_SHARED(float, shapes, SPLAT_CHUNK * kShapeNumbers);
  SPLAT_SHARED(float, bases, SPLAT_CHUNK * kRoom);
  SPLAT_SHARED(float, colours, SPLAT_CHUNK * 3);
  SPLAT_SHARED(float, rates, SPLAT_CHUNK);
  SPLAT_SHARED(uint8_t, listed_locals, SPLAT_CHUNK);
  // 2 KiB are left for sum_huge_isect_grads and the sums over the block.
  static_assert(SPLAT_CHUNK * (sizeof(float) * (kShapeNumbers + kRoom + 3 + 1) + sizeof(uint8_t)) <= kMostShared - 2048,
                "too much shared memory: take the chunk's groups of parameters one after another");
  const bool lazy = job.sh_last_step != nullptr;
  const int64_t chunk = blockIdx.x, base = chunk * SPLAT_CHUNK, slot = base + threadIdx.x;
  const bool listed = int64_t(threadIdx.x) < job.chunk_counts[2 * chunk];
  if (listed) {
    listed_locals[threadIdx.x] = uint8_t(job.ids[slot] - base);
    if (lazy) job.sh_last_step[job.ids[slot]] = job.step;
  }
  const uint32_t isect_count = listed ? job.tiles_per_gauss[slot] : 0;
  const int64_t grad_start = isect_count > 0 ? job.isect_grad_starts[slot] : 0;
  const float* huge = sum_huge_isect_grads(job.isect_grads, grad_start, isect_count, shapes);
  // Gaussians that the view does not reach have no gradient.
  for (int e = threadIdx.x; e < SPLAT_CHUNK * kShapeNumbers; e += SPLAT_CHUNK) shapes[e] = 0.0f;
  if (!lazy) {
    for (int e = threadIdx.x; e < SPLAT_CHUNK * kRoom; e += SPLAT_CHUNK) bases[e] = 0.0f;
    for (int e = threadIdx.x; e < SPLAT_CHUNK * 3; e += SPLAT_CHUNK) colours[e] = 0.0f;
  }
  __syncthreads();

  float sums[kIsectGradUsed];
  for (int f = 0; f < kIsectGradUsed; ++f) sums[f] = huge != nullptr ? huge[f] : 0.0f;
  if (isect_count < kManyIsects) sum_isect_grads(job.isect_grads, grad_start, isect_count, sums);
  const bool many = isect_count >= kManyIsects && huge == nullptr;
  sum_many_isect_grads(job.isect_grads, grad_start, isect_count, many, sums);

  ViewGrad<float> pose;
  for (int k = 0; k < 9; ++k) pose.rotation[k] = 0;
  for (int k = 0; k < 3; ++k) pose.translation[k] = pose.center[k] = 0;
  const int local = listed ? int(listed_locals[threadIdx.x]) : 0;
  if (lazy && listed && isect_count == 0) {  // it is stepped, without a gradient
    for (int k = 0; k < kRoom; ++k) bases[local * kRoom + k] = 0.0f;
    for (int k = 0; k < 3; ++k) colours[3 * local + k] = 0.0f;
  }
  if (isect_count > 0) {
    const int64_t i = base + local;
    if (job.with_abs) {  // now, so that the magnitudes need no registers later
      const float magnitudes[2] = {sums[kGradAbsX] * float(1.0 / kLog2E), sums[kGradAbsY] * float(1.0 / kLog2E)};
      add_statistics(job, i, magnitudes);
    }
    RawGeometry<float> raw;
    load_mean(job.gaussians, i, raw.mean);
    load_shape(job.gaussians, i, raw);
    RawGeometry<float> v_raw = {};
    float v_mean2d[2];
    geometry_vjp<POSE, PINHOLE>(job, raw, sums, v_raw, v_mean2d, &pose);
    float basis[kRoom], v_colour[3];
    colours_vjp<DEGREE, POSE>(job, i, raw.mean, sums, basis, v_colour, v_raw.mean, &pose);
    for (int k = 0; k < 3; ++k) {
      shapes[shape_offset(0) + 3 * local + k] = v_raw.mean[k];
      shapes[shape_offset(2) + 3 * local + k] = v_raw.log_scale[k];
      shapes[shape_offset(4) + 3 * local + k] = v_colour[k] * float(kSh0);
      colours[3 * local + k] = v_colour[k];
    }
    for (int k = 0; k < 4; ++k) shapes[shape_offset(1) + 4 * local + k] = v_raw.quat[k];
    shapes[shape_offset(3) + local] = v_raw.logit;
#pragma unroll
    for (int k = 0; k < ShN<DEGREE>::kCount; ++k) bases[local * kRoom + k] = basis[k];
    if (!job.with_abs) add_statistics(job, i, v_mean2d);
  }
  if (job.with_adam && job.means_rate.power > 0.0f && slot < job.gaussians.n)
    rates[threadIdx.x] = means_rate(job.means_rate, job.gaussians.log_scales + 3 * slot);
  __syncthreads();  // parameters have been read by all before any is changed
  const int64_t left = job.gaussians.n - base;
  const int count = left < SPLAT_CHUNK ? int(left) : SPLAT_CHUNK;
  finish_shape<0>(job, base, count, shapes, rates);
  finish_shape<1>(job, base, count, shapes, rates);
  finish_shape<2>(job, base, count, shapes, rates);
  finish_shape<3>(job, base, count, shapes, rates);
  finish_shape<4>(job, base, count, shapes, rates);
  const int stepped = lazy ? int(job.chunk_counts[2 * chunk]) : count;
  const uint8_t* const locals = lazy ? listed_locals : nullptr;
  if (job.gradients[kGroups - 1] != nullptr) store_shN<DEGREE>(job, base, stepped, locals, bases, colours);
  if (DEGREE > 0 && job.with_adam) adam_shN<DEGREE>(job, base, stepped, locals, bases, colours);
  if (POSE) store_pose(job, chunk, pose);
}

struct PoseJob {
  const float* partials;
  int64_t chunks;
  float viewmat[16];
  float* v_viewmat;
  const int64_t* counters;
};

constexpr int kPoseThreads = 256;

// One block, in a fixed order; the camera centre -R^T t is a function of the pose too. docs/math.md 3.7
__global__ void __launch_bounds__(kPoseThreads) reduce_pose(PoseJob job) {
  if (overflowed(job.counters)) return;
  float sum[15];
  for (int k = 0; k < 15; ++k) {
    float mine = 0;
    for (int64_t c = threadIdx.x; c < job.chunks; c += kPoseThreads) mine += job.partials[c * SPLAT_POSE + k];
    sum[k] = block_sum(mine);
  }
  if (threadIdx.x != 0) return;
  for (int i = 0; i < 3; ++i) {
    float v_t = sum[9 + i];
    for (int j = 0; j < 3; ++j) {
      job.v_viewmat[4 * i + j] = sum[3 * i + j] - job.viewmat[4 * i + 3] * sum[12 + j];
      v_t -= job.viewmat[4 * i + j] * sum[12 + j];
    }
    job.v_viewmat[4 * i + 3] = v_t;
  }
  for (int j = 0; j < 4; ++j) job.v_viewmat[12 + j] = 0;
}

}  // namespace gpu
}  // namespace splat
