/* What OpenMPI offers for the work of an exchange: get and accumulate on a window, and
 * an allreduce in place. Compiled and started by tf_smb/bench/mpi.py.
 *
 * Rank 0 reads requests, one a line, and writes one JSON object for each:
 *   get_accumulate ELEMENTS MAX_ITERATIONS BUDGET_S CHUNK_ELEMENTS LOCKING RATE
 *   allreduce      ELEMENTS MAX_ITERATIONS BUDGET_S CHUNK_ELEMENTS 0 0
 * and stops at the end of its input. LOCKING: 0 exclusive, 1 shared, 2 lock_all.
 *
 * get_accumulate makes the elastic move: d = rate (x - g); x <- x - d; g <- g + d, with
 * g in the memory of rank 0, as the box holds it, and x in every rank's own.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kMaxIterations = 1000, kSamples = 16, kRequestTag = 7 };
enum { kGetAccumulate = 0, kAllreduce = 1, kQuit = 2 };
enum { kExclusive = 0, kShared = 1, kLockAll = 2 };

typedef struct {
  int what;
  long elements;
  int max_iterations;
  double budget_s;
  long chunk_elements;
  int locking;
  float rate;
} Request;

typedef struct {
  float local[kSamples];
  float center[kSamples];
} Samples;

static int rank, ranks;

static float Value(long i, int of_rank) {
  return 0.5f + (float)((i * 31 + of_rank * 17) % 1009) / 1009.0f;
}

static long Min(long a, long b) { return a < b ? a : b; }

/* --- Requests. Waiting ranks sleep: MPI's own waiting would keep a core busy. --- */

static Request ReadRequest(void) {
  Request request;
  char line[256], what[32];
  memset(&request, 0, sizeof(request));
  request.what = kQuit;
  if (fgets(line, sizeof(line), stdin) != NULL &&
      sscanf(line, "%31s %ld %d %lf %ld %d %f", what, &request.elements, &request.max_iterations,
             &request.budget_s, &request.chunk_elements, &request.locking, &request.rate) == 7) {
    request.what = strcmp(what, "allreduce") == 0 ? kAllreduce : kGetAccumulate;
  }
  return request;
}

static Request NextRequest(void) {
  Request request;
  if (rank == 0) {
    request = ReadRequest();
    for (int other = 1; other < ranks; ++other) {
      MPI_Send(&request, sizeof(request), MPI_BYTE, other, kRequestTag, MPI_COMM_WORLD);
    }
    return request;
  }
  for (int there = 0;;) {
    MPI_Iprobe(0, kRequestTag, MPI_COMM_WORLD, &there, MPI_STATUS_IGNORE);
    if (there) break;
    const struct timespec pause = {0, 500000};
    nanosleep(&pause, NULL);
  }
  MPI_Recv(&request, sizeof(request), MPI_BYTE, 0, kRequestTag, MPI_COMM_WORLD,
           MPI_STATUS_IGNORE);
  return request;
}

/* --- The two operations --- */

typedef struct {
  const Request* request;
  float* x;
  float* buffer; /* get_accumulate: one chunk */
  float* center; /* get_accumulate: on rank 0 */
  MPI_Win window;
} Work;

static void MoveChunk(const Work* work, long start, long count) {
  const Request* request = work->request;
  float* const x = work->x + start;
  float* const d = work->buffer;
  if (request->locking != kLockAll) {
    MPI_Win_lock(request->locking == kExclusive ? MPI_LOCK_EXCLUSIVE : MPI_LOCK_SHARED, 0, 0,
                 work->window);
  }
  MPI_Get(d, (int)count, MPI_FLOAT, 0, start, (int)count, MPI_FLOAT, work->window);
  MPI_Win_flush(0, work->window);
  for (long i = 0; i < count; ++i) {
    d[i] = request->rate * (x[i] - d[i]);
    x[i] -= d[i];
  }
  MPI_Accumulate(d, (int)count, MPI_FLOAT, 0, start, (int)count, MPI_FLOAT, MPI_SUM,
                 work->window);
  if (request->locking == kLockAll) {
    MPI_Win_flush(0, work->window);
  } else {
    MPI_Win_unlock(0, work->window);
  }
}

static void GetAccumulate(const Work* work) {
  const long elements = work->request->elements, chunk = work->request->chunk_elements;
  const long chunks = (elements + chunk - 1) / chunk;
  const long first = chunks * rank / ranks; /* each rank begins elsewhere, as in the box */
  if (work->request->locking == kLockAll) MPI_Win_lock_all(0, work->window);
  for (long k = 0; k < chunks; ++k) {
    const long start = (first + k) % chunks * chunk;
    MoveChunk(work, start, Min(chunk, elements - start));
  }
  if (work->request->locking == kLockAll) MPI_Win_unlock_all(work->window);
}

static void Allreduce(const Work* work) {
  const long elements = work->request->elements, chunk = work->request->chunk_elements;
  for (long start = 0; start < elements; start += chunk) {
    MPI_Allreduce(MPI_IN_PLACE, work->x + start, (int)Min(chunk, elements - start), MPI_FLOAT,
                  MPI_SUM, MPI_COMM_WORLD);
  }
}

/* Keeps repeated sums from growing; not timed. */
static void Rescale(const Work* work) {
  for (long i = 0; i < work->request->elements; ++i) work->x[i] /= (float)ranks;
}

/* --- Measuring --- */

static double Timed(const Work* work) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  if (work->request->what == kAllreduce) {
    Allreduce(work);
  } else {
    GetAccumulate(work);
  }
  const double seconds = MPI_Wtime() - start;
  if (work->request->what == kAllreduce) Rescale(work);
  return seconds;
}

static int Measure(const Work* work, double* seconds) {
  Timed(work);
  double slowest = Timed(work);
  MPI_Allreduce(MPI_IN_PLACE, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  int count = (int)Min(work->request->max_iterations, (long)(work->request->budget_s / slowest));
  if (count > kMaxIterations) count = kMaxIterations;
  if (count < 1) count = 1;
  for (int i = 0; i < count; ++i) seconds[i] = Timed(work);
  return count;
}

static void TakeSamples(const Work* work, Samples* samples) {
  const long elements = work->request->elements;
  MPI_Barrier(MPI_COMM_WORLD);
  for (int i = 0; i < kSamples; ++i) {
    const long at = (elements - 1) * i / (kSamples - 1);
    samples->local[i] = work->x[at];
    samples->center[i] = work->center != NULL ? work->center[at] : 0.0f;
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

static void PrintSamples(const char* name, const Samples* samples) {
  printf(", \"%s\": [", name);
  for (int r = 0; r < ranks; ++r) {
    printf("%s{\"local\": [", r > 0 ? ", " : "");
    for (int i = 0; i < kSamples; ++i) printf("%s%.9g", i > 0 ? ", " : "", samples[r].local[i]);
    printf("], \"center\": [");
    for (int i = 0; i < kSamples; ++i) printf("%s%.9g", i > 0 ? ", " : "", samples[r].center[i]);
    printf("]}");
  }
  printf("]");
}

static void Report(int count, const double* seconds, const Samples* mine /* 3 of them */) {
  static const char* const names[3] = {"before", "once", "after"};
  double* const all = rank == 0 ? malloc(sizeof(double) * count * ranks) : NULL;
  Samples* const gathered = rank == 0 ? malloc(sizeof(Samples) * ranks) : NULL;
  MPI_Gather(seconds, count, MPI_DOUBLE, all, count, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    printf("{\"times\": [");
    for (int r = 0; r < ranks; ++r) {
      printf("%s[", r > 0 ? ", " : "");
      for (int i = 0; i < count; ++i) printf("%s%.9f", i > 0 ? ", " : "", all[r * count + i]);
      printf("]");
    }
    printf("]");
  }
  for (int s = 0; s < 3; ++s) {
    MPI_Gather(&mine[s], sizeof(Samples), MPI_BYTE, gathered, sizeof(Samples), MPI_BYTE, 0,
               MPI_COMM_WORLD);
    if (rank == 0) PrintSamples(names[s], gathered);
  }
  if (rank == 0) {
    printf("}\n");
    fflush(stdout);
  }
  free(all);
  free(gathered);
}

/* The first of them: one rank's move alone, or one sum; for the parent to check. */
static void Once(const Work* work) {
  if (work->request->what == kAllreduce) {
    Allreduce(work);
  } else if (rank == ranks - 1) {
    GetAccumulate(work);
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

static void OpenWindow(Work* work) {
  const long elements = work->request->elements;
  const MPI_Aint bytes = rank == 0 ? (MPI_Aint)(elements * (long)sizeof(float)) : 0;
  MPI_Win_allocate(bytes, sizeof(float), MPI_INFO_NULL, MPI_COMM_WORLD, &work->center,
                   &work->window);
  if (rank != 0) work->center = NULL;
  if (rank == 0) {
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 0, 0, work->window);
    for (long i = 0; i < elements; ++i) work->center[i] = Value(i, -1);
    MPI_Win_unlock(0, work->window);
  }
  work->buffer = malloc(sizeof(float) * Min(elements, work->request->chunk_elements));
}

static int Take(const Request* request) {
  static double seconds[kMaxIterations];
  Samples samples[3];
  Work work;
  memset(&work, 0, sizeof(work));
  work.request = request;
  work.x = malloc(sizeof(float) * request->elements);
  if (work.x == NULL) return 1;
  for (long i = 0; i < request->elements; ++i) work.x[i] = Value(i, rank);
  if (request->what == kGetAccumulate) OpenWindow(&work);
  TakeSamples(&work, &samples[0]);
  Once(&work);
  TakeSamples(&work, &samples[1]);
  if (request->what == kAllreduce) Rescale(&work);
  const int count = Measure(&work, seconds);
  TakeSamples(&work, &samples[2]);
  Report(count, seconds, samples);
  if (request->what == kGetAccumulate) MPI_Win_free(&work.window);
  free(work.buffer);
  free(work.x);
  return 0;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  for (;;) {
    const Request request = NextRequest();
    if (request.what == kQuit) break;
    if (Take(&request) != 0) MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
