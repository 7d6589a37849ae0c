// Enqueues the noise on the means: kernels/noise.cuh. 44 bytes read and 12 written for each Gaussian.
#include "../../kernels/noise.cuh"

#include "arrays.h"
#include "launch.h"
#include "stages.h"

namespace splat {
namespace gpu {

void noise(const SplatCall& call, const SplatGaussians& gaussians, const SplatNoise& noise) {
  NoiseJob job = {};
  job.gaussians = raw_arrays(gaussians);
  job.means = static_cast<float*>(gaussians.means);
  job.seed = noise.seed;
  job.step = noise.step, job.first = noise.first;
  job.scale = float(noise.scale), job.threshold = float(noise.threshold), job.steepness = float(noise.steepness);
  job.counters = noise.counters;
  SPLAT_LAUNCH(push_means, (gaussians.n + kNoiseThreads - 1) / kNoiseThreads, kNoiseThreads, stream_of(call), job);
}

}  // namespace gpu
}  // namespace splat
