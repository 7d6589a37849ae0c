/* The C ABI of the native core. One header serves every backend: the CPU library and the CUDA library export the same
 * names. No function allocates; the caller owns outputs and workspaces, and the functions below give their sizes.
 *
 * Every struct starts with its own size, so that a caller built against another header is refused and not misread.
 * Pointers are to contiguous arrays on the call's device; `real` means float or double, by SplatCall.dtype.
 * Functions return 0, or a negative number with a message in splat_last_error() (one a thread): -1;
 * SPLAT_DEVICE_FAULT where the GPU or its driver has failed; SPLAT_LAUNCH_REFUSED where CUDA refuses a launch or a call
 * and the device is sound, because library, driver and GPU do not fit together.
 *
 * The CPU library has done its work when it returns. The CUDA library only enqueues on the caller's stream and never
 * waits: it writes its counts to device memory (SplatFrame.counters, SplatLoss.means), and the fields marked
 * "CPU: result" are capacities that the caller chose. A view with more tile intersections than max_isects raises an
 * overflow flag. Every later entry on the same counters then does nothing, until the caller clears the flag and calls
 * again.
 *
 * Words: a tile intersection ("isect") is a pair of a Gaussian and a 16x16 tile that it may touch. A tile row is a row
 * of tiles of the image. Projected Gaussians are the visible ones, compacted within their chunk.
 */
#ifndef SPLAT_H
#define SPLAT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPLAT_ABI_VERSION 16
#define SPLAT_CHUNK 256      /* Gaussians a work unit; arrays over visible Gaussians have N rounded up to it */
#define SPLAT_TILE 16        /* pixels a side */
#define SPLAT_PROJECTED 16   /* reals of a projected Gaussian */
#define SPLAT_ISECT_GRAD 16  /* reals of the gradient of a tile intersection */
#define SPLAT_POSE 16        /* reals of a chunk's partial sum of the pose gradient */
#define SPLAT_BOUNDS 8       /* reals of the bounds of a chunk, see SplatView */
#define SPLAT_CHANNELS_AT_ONCE 64 /* channels whose gradients splat_blend_vjp sums in a pass over the intersections */

#define SPLAT_DEVICE_FAULT (-2)
#define SPLAT_LAUNCH_REFUSED (-3)

/* SplatFrame.counters */
enum {
  SPLAT_COUNT_VISIBLE = 0,    /* after splat_project */
  SPLAT_COUNT_MAX_ISECTS = 1, /* after splat_project: upper bound of the tile intersections */
  SPLAT_COUNT_ISECTS = 2,     /* after splat_bin */
  SPLAT_COUNT_OVERFLOW = 3,   /* not 0: a view had more intersections than max_isects; stays until it is cleared */
  SPLAT_COUNTERS = 4,
};

enum { SPLAT_FLOAT32 = 0, SPLAT_FLOAT64 = 1 };
/* How a camera point becomes a pixel, see SplatView.camera_model: docs/math.md 3.1, 3.9, 3.10 */
enum { SPLAT_CAMERA_PINHOLE = 0, SPLAT_CAMERA_ORTHO = 1, SPLAT_CAMERA_FISHEYE = 2 };
enum { SPLAT_ISA_PORTABLE = 0, SPLAT_ISA_AVX2 = 1, SPLAT_ISA_AVX512 = 2, SPLAT_ISA_NEON = 3 };

/* How to run: first argument of every entry. */
typedef struct SplatCall {
  uint32_t struct_size;
  int32_t device;  /* ordinal; ignored by the CPU library */
  void* stream;    /* the caller's current stream; ignored by the CPU library */
  int32_t dtype;   /* SPLAT_FLOAT32; SPLAT_FLOAT64 in the portable CPU library only */
  int32_t threads; /* CPU: threads, at least 1. CUDA: 1 asks for the simple kernels where there are two */
} SplatCall;

/* A camera, OpenCV axes; how to render through it.
 *
 * Binning and blending process the tile rows [tile_row_begin, tile_row_end) and leave the rest of the image and of
 * tile_ends unchanged; projection and the loss process the whole image. So a view whose tile intersections do not fit
 * into memory is made band by band, with the same bits: project, then bin and blend each band. Backward: bin, blend_vjp
 * and sum_isect_grads for each band, then project_vjp with the sums as the only gradient of each Gaussian.
 */
typedef struct SplatView {
  uint32_t struct_size;
  int32_t width, height; /* pixels */
  int32_t sh_degree;     /* in use, 0 to 4 */
  int32_t antialiased;   /* scale opacity by what the blur added */
  int32_t with_depth;    /* also accumulate depth */
  int32_t tile_row_begin, tile_row_end;
  double viewmat[16];    /* world to camera, row major */
  double fx, fy, cx, cy; /* pixels; fx and fy of SPLAT_CAMERA_ORTHO are pixels a world unit, those of
                            SPLAT_CAMERA_FISHEYE pixels a radian */
  double z_near, z_far;  /* world units */
  const void* filter_3d; /* real [n] standard deviation of each Gaussian's 3D filter, world units; NULL: none */
  const void* bounds;    /* CPU, for splat_project: real [M / SPLAT_CHUNK, SPLAT_BOUNDS], of each chunk's Gaussians the
                            least and largest mean x y z, the largest log-scale and filter_3d; chunks that the view
                            cannot see are skipped. Or NULL; CUDA does not read it */
  int32_t camera_model;  /* SPLAT_CAMERA_PINHOLE, ... */
  int32_t reserved;
} SplatView;

/* Raw parameters, or anything of the same shape (gradients, moments). */
typedef struct SplatGaussians {
  uint32_t struct_size;
  int32_t shN_count;      /* K: coefficients in shN, 0 3 8 15 or 24 */
  int64_t n;
  void* means;            /* real [n, 3] */
  void* quats;            /* real [n, 4] w x y z, unnormalised */
  void* log_scales;       /* real [n, 3] */
  void* logit_opacities;  /* real [n] */
  void* sh0;              /* real [n, 3] */
  void* shN;              /* real [n, K, 3] */
} SplatGaussians;

/* Colours of any number of channels, of any sign. */
typedef struct SplatChannels {
  uint32_t struct_size;
  int32_t count;        /* channels, at least 1 */
  int64_t n;            /* Gaussians */
  const void* colors;   /* real [n, count] */
  void* isect_grads;    /* real [isects, min(count, SPLAT_CHANNELS_AT_ONCE)] workspace of splat_blend_vjp, with v_colors;
                           CUDA: [max_isects, ...] */
  void* v_colors;       /* real [n, count], += by splat_blend_vjp; may be NULL */
} SplatChannels;

/* The arrays between the stages of one view. M = n rounded up to SPLAT_CHUNK; T = tiles of the image. */
typedef struct SplatFrame {
  uint32_t struct_size;
  int32_t with_abs;            /* splat_blend_vjp also sums magnitudes of dL/dmean2d, and splat_project_vjp uses them */
  /* splat_project */
  void* projected;             /* real [M, SPLAT_PROJECTED]; 64-byte aligned */
  int32_t* ids;                /* [M] index of the Gaussian */
  int64_t* chunk_counts;       /* [M / SPLAT_CHUNK, 2] visible Gaussians; upper bound of their tile intersections */
  uint32_t* tiles_per_gauss;   /* [M] tiles of the Gaussian's box; after splat_bin its intersections in the tile rows */
  int64_t visible;             /* CPU: result. CUDA: capacity of the arrays over visible Gaussians, M */
  int64_t max_isects;          /* capacity for tile intersections, CUDA: below 2^31. CPU: result of splat_project, for the
                                  whole image */
  int64_t* counters;           /* [SPLAT_COUNTERS] CUDA only */
  /* splat_bin */
  void* workspace;             /* splat_bin_bytes() */
  int64_t workspace_bytes;
  uint32_t* isect_grad_starts; /* [M] row of isect_grads at which those of the Gaussian start */
  int64_t* tile_starts;        /* [T + 1] */
  int32_t* tile_order;         /* [T] CUDA: tiles of the tile rows in the order of blending; NULL: row by row */
  uint32_t* isect_gaussians;   /* [max_isects] index into projected, front to back in each tile */
  uint32_t* isect_grad_rows;   /* [max_isects] row of isect_grads */
  uint16_t* isect_masks;       /* [max_isects] 4x4 blocks of the tile that the Gaussian reaches */
  int64_t isects;              /* CPU: result. CUDA: not used */
  /* splat_blend */
  int32_t* tile_ends;          /* [T] intersections of the tile up to the last at which a pixel stopped */
  /* splat_blend_vjp */
  void* isect_grads;           /* real [isects, SPLAT_ISECT_GRAD], CUDA: [max_isects, ...]; 64-byte aligned. With
                                  channels it may be NULL: then only v_colors and v_background are made */
  /* splat_blend, splat_blend_vjp */
  const SplatChannels* channels; /* blended instead of the projected Gaussians' colours, which have no gradient then; the
                                    images, the background and background_partials have as many channels. NULL: three */
} SplatFrame;

typedef struct SplatImages {
  uint32_t struct_size;
  int32_t reserved;
  void* image;      /* real [height, width, 3] */
  void* alpha;      /* real [height, width] */
  void* depth;      /* real [height, width], sum of weight times z; may be NULL without with_depth */
} SplatImages;

/* Adam in place. Moments have the shapes of the parameters.
 * With sh_last_step, shN of a Gaussian stays unchanged while no view reaches it, and splat_project applies the missed
 * steps when one does: the same numbers as if every step had been taken, up to rounding, without their traffic. */
typedef struct SplatAdam {
  uint32_t struct_size;
  int32_t reserved;
  int64_t step;       /* counted from 1 */
  double beta1, beta2, eps;
  double lr[6];       /* in the order of SplatGaussians; that of shN is one for all steps */
  SplatGaussians exp_avg, exp_avg_sq;
  int32_t* sh_last_step;      /* [n] last step applied to shN and its moments; NULL: every step changes every number */
  const double* decay_table;  /* [decay_rows, 2] see math/adam.h; with sh_last_step */
  int64_t decay_rows;
  /* Weights of mean opacity and of mean standard deviation (world units) in the loss: their gradients are added here
   * and are in no SplatProjectGrad.gradients. docs/math.md 8.2 */
  double opacity_reg, scale_reg;
  int64_t total;      /* Gaussians of these means, where other processes hold some of them; 0: those of the call */
  /* The rate of a mean grows with its Gaussian's size to this power, relative to exp(log_size); 0: one rate for all.
   * docs/math.md 8.7 */
  double size_power, log_size;
} SplatAdam;

/* Exploration noise on the means, docs/math.md 9. Every backend draws the same numbers: a function of seed, step and
 * index, which counts from the first Gaussian of all processes. */
typedef struct SplatNoise {
  uint32_t struct_size;
  int32_t reserved;
  uint64_t seed;
  int64_t step;
  double scale;                 /* world units of push for a covariance of 1 */
  double threshold, steepness;  /* Gaussians more opaque than the threshold hardly move */
  const int64_t* counters;      /* CUDA: as in SplatFrame, or NULL; nothing is done when the overflow flag is set */
  int64_t first;                /* index of the call's first Gaussian */
} SplatNoise;

/* Outputs of splat_project_vjp; every pointer may be NULL. */
typedef struct SplatProjectGrad {
  uint32_t struct_size;
  int32_t reserved;
  const SplatGaussians* gradients; /* written in full, zero where invisible */
  const SplatAdam* adam;           /* applied at once, no gradient is stored; SH above sh_degree is left unchanged */
  void* pose_partials;             /* real [M / SPLAT_CHUNK, SPLAT_POSE]; splat_pose_vjp makes the pose's gradient of it */
  void* grad2d;                    /* real [n], += |(W/2, H/2) dL/dmean2d|; with_abs: of the sums of magnitudes */
  void* count;                     /* real [n], += 1 where visible */
} SplatProjectGrad;

/* The loss of a stack of independent images. */
typedef struct SplatLoss {
  uint32_t struct_size;
  int32_t width, height;
  int32_t target_is_u8;
  int32_t channels;     /* 3, interleaved; or 1 */
  int32_t images;       /* in the stack, at least 1 */
  int32_t border;       /* pixels at each edge whose SSIM is left out of the mean; at least one pixel remains */
  int32_t reserved;
  double ssim_lambda;   /* loss = (1 - lambda) mean|x - y| + lambda (1 - mean SSIM) */
  const void* image;    /* real [images, height, width, channels] */
  const void* target;   /* uint8 or real, same shape */
  void* v_image;        /* real, same shape: gradient of the loss; or NULL */
  void* workspace;      /* splat_loss_bytes(); CUDA: 16-byte aligned */
  double l1, ssim;      /* CPU: results, the means */
  double* means;        /* CUDA: [2] l1, ssim */
  const int64_t* counters; /* CUDA: as in SplatFrame, or NULL; nothing is done when the overflow flag is set */
  const uint8_t* mask;  /* CPU, without v_image: [images, height, width], not 0 where SSIM is left out of the mean,
                           which is NaN when no pixel remains; or NULL */
} SplatLoss;

int32_t splat_abi_version(void);
const char* splat_last_error(void);
/* The best instruction set that this processor runs; the CPU library comes once for each. */
int32_t splat_best_isa(void);

/* Activates, projects and colours; counts. With an adam that has sh_last_step, shN of the visible Gaussians and its
 * moments are brought to adam.step - 1 first; else adam is not read and may be NULL. */
int32_t splat_project(const SplatCall*, const SplatView*, const SplatGaussians*, SplatFrame*, const SplatAdam*);
/* Upper bound of the tile intersections in each tile row of the image, for any tile_row_begin and tile_row_end; int64
 * [tile rows], zeros before. */
int32_t splat_tile_row_isects(const SplatCall*, const SplatView*, const SplatGaussians*, const SplatFrame*,
                              int64_t* tile_row_isects);
/* Bytes that splat_bin needs for `visible` Gaussians and `max_isects` tile intersections. */
int64_t splat_bin_bytes(const SplatCall*, const SplatView*, const SplatFrame*);
/* Sorts by depth and lists the intersections of each tile. Bytes and lists depend on `visible` and `max_isects`. */
int32_t splat_bin(const SplatCall*, const SplatView*, const SplatGaussians*, SplatFrame*);
int32_t splat_blend(const SplatCall*, const SplatView*, const SplatFrame*, const void* background,
                    const SplatImages* out);
/* v_out: gradients of the images; alpha and depth may be NULL. background_partials: real [T, 3], with v_background,
 * which sums over all tiles: only the call for the last band asks for it. */
int32_t splat_blend_vjp(const SplatCall*, const SplatView*, const SplatFrame*, const void* background,
                        const SplatImages* out, const SplatImages* v_out, void* background_partials,
                        void* v_background);
/* Adds the intersection gradients of each visible Gaussian to its sum, in their order: sums real [M, SPLAT_ISECT_GRAD],
 * reached uint32 [M], 1 where there was one; both zero before the first band. */
int32_t splat_sum_isect_grads(const SplatCall*, const SplatGaussians*, const SplatFrame*, void* sums,
                              uint32_t* reached);
int32_t splat_project_vjp(const SplatCall*, const SplatView*, const SplatGaussians*, const SplatFrame*,
                          const SplatProjectGrad*);
/* Sums the pose_partials of `chunks` chunks, also of several splat_project_vjp, in their order; the gradient of the
 * world-to-camera matrix goes to v_viewmat, real [4, 4], last row 0. Of the frame, counters alone are read. */
int32_t splat_pose_vjp(const SplatCall*, const SplatView*, const SplatFrame*, const void* pose_partials,
                       int64_t chunks, void* v_viewmat);
int64_t splat_loss_bytes(const SplatCall*, const SplatLoss*);
int32_t splat_loss(const SplatCall*, SplatLoss*);
/* One dense Adam step from gradients in memory; sh_last_step is not read. */
int32_t splat_adam(const SplatCall*, const SplatGaussians* params, const SplatGaussians* gradients, const SplatAdam*);
/* Adds the noise to every mean. */
int32_t splat_noise(const SplatCall*, const SplatGaussians*, const SplatNoise*);

#ifdef __cplusplus
}
#endif
#endif
