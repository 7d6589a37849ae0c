// The CPU twin's functions of one number: a lane of the vectors that the portable build computes with.
#include "../cpu/lanes.h"

namespace splat {
namespace {

template <class F>
float first_lane(float x, F function) {
  float lanes[4] = {x, x, x, x};
  function(Lanes<float, 4>::load(lanes)).store(lanes);
  return lanes[0];
}

}  // namespace

float exp_(float x) {
  return first_lane(x, [](Lanes<float, 4> v) { return exp_(v); });
}
float log2_(float x) {
  return first_lane(x, [](Lanes<float, 4> v) { return log2_(v); });
}
float exp2_bounded(float x) {
  return first_lane(x, [](Lanes<float, 4> v) { return exp2_bounded(v); });
}

}  // namespace splat
