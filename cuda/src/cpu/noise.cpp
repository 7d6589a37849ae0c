// Noise on the means, sixteen Gaussians at a time. docs/math.md 9
#include "../../math/noise.h"

#include "geometry.h"
#include "pool.h"

namespace splat {
namespace {

template <class Real>
struct ChunkNoise {
  using F = Lanes<Real, kLanes>;
  const SplatGaussians& gaussians;
  const SplatNoise& noise;

  void operator()(int64_t chunk) const {
    const int64_t begin = chunk * kChunk, end = std::min(gaussians.n, begin + kChunk);
    for (int64_t i = begin; i < end; i += kLanes) sixteen(i, int(std::min<int64_t>(kLanes, end - i)));
  }

  void sixteen(int64_t first, int count) const {
    int32_t lane_ids[kLanes];
    Real uniform[4][kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      lane_ids[lane] = lane < count ? lane : count - 1;
      const uint64_t index = uint64_t(noise.first + first + lane);
      uint32_t words[4] = {uint32_t(index), uint32_t(noise.step), uint32_t(uint64_t(noise.step) >> 32),
                           uint32_t(index >> 32)};
      philox(words, uint32_t(noise.seed), uint32_t(noise.seed >> 32));
      for (int k = 0; k < 4; ++k) uniform[k][lane] = uniform_of<Real>(words[k]);
    }
    F normal[4];
    for (int k = 0; k < 4; k += 2) normal_pair(F::load(uniform[k]), F::load(uniform[k + 1]), normal + k);

    const RawGeometry<F> raw = load_geometry<Real>(gaussians, first, lane_ids);
    F push[3];
    exploration(raw.quat, raw.log_scale, raw.logit, Real(noise.scale), Real(noise.threshold), Real(noise.steepness),
                normal, push);
    Real* means = static_cast<Real*>(gaussians.means) + 3 * first;
    for (int k = 0; k < 3; ++k) {
      Real moved[kLanes];
      select(abs_(push[k]) < F(kHuge), raw.mean[k] + push[k], raw.mean[k]).store(moved);
      for (int lane = 0; lane < count; ++lane) means[3 * lane + k] = moved[lane];
    }
  }
};

}  // namespace

template <class Real>
void Stages<Real>::noise(const SplatCall& call, const SplatGaussians& gaussians, const SplatNoise& noise) {
  parallel_for(call.threads, chunks_of(gaussians.n), ChunkNoise<Real>{gaussians, noise});
}

template void Stages<float>::noise(const SplatCall&, const SplatGaussians&, const SplatNoise&);
#ifdef SPLAT_WITH_DOUBLE
template void Stages<double>::noise(const SplatCall&, const SplatGaussians&, const SplatNoise&);
#endif

}  // namespace splat
