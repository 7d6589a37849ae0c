/* The C ABI of the native core. One header for every backend: the CPU library and the CUDA library export the same
 * names. No function allocates; outputs and workspaces are the caller's, sizes follow from the functions below.
 *
 * Every struct starts with its own size, so that a caller built against another header is refused and not misread.
 * Pointers are to contiguous arrays on the call's device; `real` means float or double, by SplatCall.dtype.
 * Functions return 0, or -1 with a message in splat_last_error() (one a thread).
 *
 * The CPU library has done its work when it returns. The CUDA library only enqueues on the caller's stream and never
 * waits: what it counts it writes to device memory (SplatFrame.counters, SplatLoss.means), and the fields marked
 * "CPU: result" are capacities that the caller chose. A view with more pairs than there is room for raises an overflow
 * flag that makes every later entry on the same counters do nothing, until the caller clears it and asks again.
 */
#ifndef SPLAT_H
#define SPLAT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPLAT_ABI_VERSION 9
#define SPLAT_CHUNK 256      /* Gaussians a work unit; arrays over visible Gaussians have N rounded up to it */
#define SPLAT_TILE 16        /* pixels a side */
#define SPLAT_RECORD 16      /* reals of a visible Gaussian */
#define SPLAT_ROW 16         /* reals of a (Gaussian, tile) pair in the backward pass */
#define SPLAT_POSE 16        /* reals of a chunk's share of the pose gradient */

/* SplatFrame.counters */
enum {
  SPLAT_COUNT_VISIBLE = 0,    /* after splat_project */
  SPLAT_COUNT_PAIR_BOUND = 1, /* after splat_project */
  SPLAT_COUNT_PAIRS = 2,      /* after splat_bin */
  SPLAT_COUNT_OVERFLOW = 3,   /* not 0: a view had more pairs than pair_bound; stays until the caller clears it */
  SPLAT_COUNTERS = 4,
};

enum { SPLAT_FLOAT32 = 0, SPLAT_FLOAT64 = 1 };
enum { SPLAT_ISA_PORTABLE = 0, SPLAT_ISA_AVX2 = 1, SPLAT_ISA_AVX512 = 2 };

/* How to run: first argument of every entry. */
typedef struct SplatCall {
  uint32_t struct_size;
  int32_t device;  /* ordinal; ignored by the CPU library */
  void* stream;    /* the caller's current stream; ignored by the CPU library */
  int32_t dtype;   /* SPLAT_FLOAT32; SPLAT_FLOAT64 in the portable CPU library only */
  int32_t threads; /* CPU: threads, at least 1. CUDA: 1 asks for the simple kernels where there are two */
} SplatCall;

/* A pinhole camera, OpenCV axes; how to render through it.
 *
 * A line is a row of tiles. Binning and blending see the lines [line_begin, line_end) and leave the rest of the image and
 * of tile_ends alone; projection and the loss see the whole. So a view whose pairs do not fit into memory is made band by
 * band, with the same bits: project, then for each band bin and blend. Backward for each band bin, blend_vjp and
 * sum_rows, then project_vjp with the sums as the only row of each Gaussian.
 */
typedef struct SplatView {
  uint32_t struct_size;
  int32_t width, height; /* pixels */
  int32_t sh_degree;     /* in use, 0 to 4 */
  int32_t antialiased;   /* scale opacity by what the blur added */
  int32_t with_depth;    /* also accumulate depth */
  int32_t line_begin, line_end;
  double viewmat[16];    /* world to camera, row major */
  double fx, fy, cx, cy; /* pixels */
  double z_near, z_far;  /* world units */
  const void* smoothing; /* real [n] deviation of the 3D filter of each Gaussian, world units; NULL: none */
} SplatView;

/* Raw parameters, or anything of the same shape (gradients, moments). */
typedef struct SplatGaussians {
  uint32_t struct_size;
  int32_t sh_rest;        /* K: coefficients in shN, 0 3 8 15 or 24 */
  int64_t n;
  void* means;            /* real [n, 3] */
  void* quats;            /* real [n, 4] w x y z, unnormalised */
  void* log_scales;       /* real [n, 3] */
  void* logit_opacities;  /* real [n] */
  void* sh0;              /* real [n, 3] */
  void* shN;              /* real [n, K, 3] */
} SplatGaussians;

/* What the stages hand to each other for one view. M = n rounded up to SPLAT_CHUNK; T = tiles of the image. */
typedef struct SplatFrame {
  uint32_t struct_size;
  int32_t with_abs;        /* splat_blend_vjp also sums magnitudes of dL/dmean2d, and splat_project_vjp takes those */
  /* splat_project */
  void* records;           /* real [M, SPLAT_RECORD]; 64-byte aligned */
  int32_t* ids;            /* [M] index of the Gaussian */
  int64_t* chunk_counts;   /* [M / SPLAT_CHUNK, 2] visible Gaussians; upper bound of their tile pairs */
  uint32_t* row_counts;    /* [M] tiles of a visible Gaussian's box; after splat_bin its rows in the view's lines */
  int64_t visible;         /* CPU: result. CUDA: room in the arrays over visible Gaussians, M */
  int64_t pair_bound;      /* at least the number of pairs, for which there is room. CPU: result, of the whole image */
  int64_t* counters;       /* [SPLAT_COUNTERS] CUDA only */
  /* splat_bin */
  void* workspace;         /* splat_bin_bytes() */
  int64_t workspace_bytes;
  uint32_t* row_starts;    /* [M] first row of a visible Gaussian */
  int64_t* tile_starts;    /* [T + 1] */
  uint32_t* pair_records;  /* [pair_bound] front to back in each tile */
  uint32_t* pair_rows;     /* [pair_bound] */
  uint16_t* pair_masks;    /* [pair_bound] 4x4 blocks of the tile that are reached */
  int64_t pairs;           /* CPU: result. CUDA: not used */
  /* splat_blend */
  int32_t* tile_ends;      /* [T] pairs of the tile up to its last stop */
  /* splat_blend_vjp */
  void* rows;              /* real [pairs, SPLAT_ROW] (CUDA: [pair_bound, SPLAT_ROW]); 64-byte aligned */
} SplatFrame;

typedef struct SplatImages {
  uint32_t struct_size;
  int32_t reserved;
  void* image;      /* real [height, width, 3] */
  void* alpha;      /* real [height, width] */
  void* depth;      /* real [height, width], sum of weight times z; may be NULL without with_depth */
} SplatImages;

/* Adam in place. Moments have the shapes of the parameters.
 * With rest_steps, shN of a Gaussian stays as it is while no view reaches it, and splat_project makes up for the steps
 * it missed when one does: the same numbers as if every step had been taken, up to rounding, without their traffic. */
typedef struct SplatAdam {
  uint32_t struct_size;
  int32_t reserved;
  int64_t step;       /* counted from 1 */
  double beta1, beta2, eps;
  double lr[6];       /* in the order of SplatGaussians; that of shN is one for all steps */
  SplatGaussians exp_avg, exp_avg_sq;
  int32_t* rest_steps;  /* [n] the step that shN and its moments stand at; NULL: every step moves every number */
  const double* gaps;   /* [gap_count, 2] see math/adam.h; with rest_steps */
  int64_t gap_count;
  /* Weights of mean opacity and of mean standard deviation (world units) in what is minimised, beside the image's loss:
   * their gradients are added here, and are in no SplatProjectGrad.gradients. docs/math.md 8.2 */
  double opacity_reg, scale_reg;
  int64_t total;      /* Gaussians that these means are over, where others hold some of them; 0: those of the call */
} SplatAdam;

/* Random pushes of the means, docs/math.md 9. The same numbers on every backend: they depend on seed, step and index, which
 * is counted from the first Gaussian of all where others hold those before. */
typedef struct SplatNoise {
  uint32_t struct_size;
  int32_t reserved;
  uint64_t seed;
  int64_t step;
  double scale;                 /* world units of push for a covariance of 1 */
  double threshold, steepness;  /* what is more opaque than the threshold is hardly pushed */
  const int64_t* counters;      /* CUDA: as in SplatFrame, or NULL; nothing is done when the overflow flag is up */
  int64_t first;                /* index of the call's first Gaussian */
} SplatNoise;

/* Where splat_project_vjp puts things; every pointer may be NULL. */
typedef struct SplatProjectGrad {
  uint32_t struct_size;
  int32_t reserved;
  const SplatGaussians* gradients; /* written in full, zero where invisible */
  const SplatAdam* adam;           /* or applied at once, never materialised; SH above sh_degree is left alone */
  void* pose_partials;             /* real [M / SPLAT_CHUNK, SPLAT_POSE] workspace, with v_viewmat */
  void* v_viewmat;                 /* real [4, 4], last row 0 */
  void* grad2d;                    /* real [n], += |(W/2, H/2) dL/dmean2d|; with frame->with_abs of the pixels' shares' magnitudes */
  void* count;                     /* real [n], += 1 where visible */
} SplatProjectGrad;

/* Of a stack of images, which do not see each other. */
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
  void* v_image;        /* real, same shape: gradient of the loss */
  void* workspace;      /* splat_loss_bytes() */
  double l1, ssim;      /* CPU: results, the means */
  double* means;        /* CUDA: [2] l1, ssim */
  const int64_t* counters; /* CUDA: as in SplatFrame, or NULL; nothing is done when the overflow flag is up */
} SplatLoss;

int32_t splat_abi_version(void);
const char* splat_last_error(void);
/* The best instruction set that this processor runs; the CPU library comes once for each. */
int32_t splat_best_isa(void);

/* Projects, activates, colours; counts. With an adam that has rest_steps, shN of what is visible and its moments are
 * brought to adam.step - 1 first; else adam is not looked at and may be NULL. */
int32_t splat_project(const SplatCall*, const SplatView*, const SplatGaussians*, SplatFrame*, const SplatAdam*);
/* Upper bound of the pairs in each line of the image, whatever lines the view has; int64 [lines], zeros before. */
int32_t splat_line_pairs(const SplatCall*, const SplatView*, const SplatGaussians*, const SplatFrame*,
                         int64_t* line_pairs);
/* Bytes that splat_bin needs for `visible` Gaussians and `pair_bound` pairs in the view's tiles. */
int64_t splat_bin_bytes(const SplatCall*, const SplatView*, const SplatFrame*);
/* Sorts by depth and lists, for each tile, what reaches it. Bytes and lists depend on `visible` and `pair_bound`. */
int32_t splat_bin(const SplatCall*, const SplatView*, const SplatGaussians*, SplatFrame*);
int32_t splat_blend(const SplatCall*, const SplatView*, const SplatFrame*, const void* background,
                    const SplatImages* out);
/* v_out: gradients of the images; alpha and depth may be NULL. background_partials: real [T, 3], with v_background, which
 * sums over all tiles: of several bands the last one asks for it. */
int32_t splat_blend_vjp(const SplatCall*, const SplatView*, const SplatFrame*, const void* background,
                        const SplatImages* out, const SplatImages* v_out, void* background_partials,
                        void* v_background);
/* Adds the rows of each visible Gaussian to its sum, in their order: sums real [M, SPLAT_ROW], reached uint32 [M], 1 where
 * there was a row; both zero before the first band. */
int32_t splat_sum_rows(const SplatCall*, const SplatGaussians*, const SplatFrame*, void* sums, uint32_t* reached);
int32_t splat_project_vjp(const SplatCall*, const SplatView*, const SplatGaussians*, const SplatFrame*,
                          const SplatProjectGrad*);
int64_t splat_loss_bytes(const SplatCall*, const SplatLoss*);
int32_t splat_loss(const SplatCall*, SplatLoss*);
/* Every number, from gradients in memory; rest_steps is not looked at. */
int32_t splat_adam(const SplatCall*, const SplatGaussians* params, const SplatGaussians* gradients, const SplatAdam*);
/* Moves every mean. */
int32_t splat_noise(const SplatCall*, const SplatGaussians*, const SplatNoise*);

#ifdef __cplusplus
}
#endif
#endif
