/* CPU kernels for rounds and prompts: float32 arithmetic, weights in float32 or bfloat16 (widened exactly).
 *
 * A row never sees its neighbours: every output is one fixed sequence of operations on that row's own data, whatever
 * the number of rows, threads or pages. Each function here has a reference in PyTorch beside its caller. Each takes the
 * address of its arguments, so that calls can be kept and run again.
 *
 * N tokens of B rows, row after row: those of row b are offsets[b] .. offsets[b + 1] - 1.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local int replay_ends;  /* a kernel has found that what follows it in a replay is not needed */

#include "pool.h"
#include "vector.h"
#include "linear.h"
#include "norms.h"
#include "attention.h"
#include "delta.h"
#include "rounds.h"
#include "noise.h"
#include "draws.h"
#include "sure.h"
#include "truncate.h"

typedef struct {
    void (*kernel)(const void *arguments);
    const void *arguments;
} Call;

typedef struct {
    const Call *calls;
    long count;
} Replay;

void replay(const Replay *a) {
    replay_ends = 0;
    for (long i = 0; i < a->count && !replay_ends; i++) a->calls[i].kernel(a->calls[i].arguments);
}
