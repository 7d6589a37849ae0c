// Noise on the means, a thread a Gaussian. docs/math.md 9
#pragma once
#include "../math/noise.h"
#include "geometry.cuh"

namespace splat {
namespace gpu {

struct NoiseJob {
  RawArrays gaussians;
  float* means;
  uint64_t seed;
  int64_t step, first;
  float scale, threshold, steepness;
  const int64_t* counters;
};

constexpr int kNoiseThreads = 256;

__global__ void __launch_bounds__(kNoiseThreads) push_means(NoiseJob job) {
  if (overflowed(job.counters)) return;
  const int64_t i = int64_t(blockIdx.x) * kNoiseThreads + threadIdx.x;
  if (i >= job.gaussians.n) return;
  const uint64_t index = uint64_t(job.first + i);
  uint32_t words[4] = {uint32_t(index), uint32_t(job.step), uint32_t(uint64_t(job.step) >> 32), uint32_t(index >> 32)};
  philox(words, uint32_t(job.seed), uint32_t(job.seed >> 32));
  float normal[4];
  for (int k = 0; k < 4; k += 2)
    normal_pair(uniform_of<float>(words[k]), uniform_of<float>(words[k + 1]), normal + k);
  RawGeometry<float> raw;
  load_shape(job.gaussians, i, raw);
  float push[3];
  exploration(raw.quat, raw.log_scale, raw.logit, job.scale, job.threshold, job.steepness, normal, push);
  for (int k = 0; k < 3; ++k)
    if (abs_(push[k]) < float(kHuge)) job.means[3 * i + k] = job.means[3 * i + k] + push[k];
}

}  // namespace gpu
}  // namespace splat
