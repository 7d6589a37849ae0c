// TEMPORARY: stages that are not written yet.
#include <stdexcept>

#include "../cuda/stages.h"
#define W __attribute__((weak))
#define NOT throw std::runtime_error("stage not written yet")
namespace splat {
namespace gpu {
W void project(const SplatCall&, const SplatView&, const SplatGaussians&, SplatFrame&) { NOT; }
W int64_t bin_bytes(const SplatView&, const SplatFrame&) { return -1; }
W void bin(const SplatCall&, const SplatView&, const SplatGaussians&, SplatFrame&) { NOT; }
W void blend(const SplatCall&, const SplatView&, const SplatFrame&, const void*, const SplatImages&) { NOT; }
W void blend_vjp(const SplatCall&, const SplatView&, const SplatFrame&, const void*, const SplatImages&,
                 const SplatImages&, void*, void*) { NOT; }
W void project_vjp(const SplatCall&, const SplatView&, const SplatGaussians&, const SplatFrame&,
                   const SplatProjectGrad&) { NOT; }
W int64_t loss_bytes(const SplatLoss&) { return -1; }
W void loss(const SplatCall&, SplatLoss&) { NOT; }
W void adam(const SplatCall&, const SplatGaussians&, const SplatGaussians&, const SplatAdam&) { NOT; }
}  // namespace gpu
}  // namespace splat
