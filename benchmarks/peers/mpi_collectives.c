/* Times Open MPI's collectives, as scripts/bench commands; the counterpart of benchmarks/collectives.cc, for some of its
 * operations.
 *
 * Commands come on a named pipe of each rank's own: see benchmarks/command_loop.h. By hand:
 *     mpirun -n 2 bench_mpi all_reduce 26214400 100 5
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const long cpu_time_from_bytes = 1 << 20; /* below it, reading the clock would disturb */
static int rank, size;

static void fail(const char* what, const char* value) {
  fprintf(stderr, "bench_mpi, rank %d: %s%s\n", rank, what, value);
  MPI_Abort(MPI_COMM_WORLD, 1);
  exit(1);
}

static int64_t now(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* A buffer that grows to the largest size asked for. */
struct buffer {
  float* data;
  long bytes;
};

static float* first(struct buffer* buffer, long bytes) {
  if (buffer->bytes < bytes) {
    free(buffer->data);
    if (posix_memalign((void**)&buffer->data, 4096, (size_t)bytes) != 0) fail("out of memory", "");
    buffer->bytes = bytes;
  }
  return buffer->data;
}

static float contribution(long iteration, int of_rank) { return (float)(iteration % 5 + of_rank + 1); }

static void fill(float* data, long count, float value) {
  for (long i = 0; i < count; ++i) data[i] = value;
}

static void check_ends(const float* data, long count, float expected, const char* operation) {
  if (data[0] != expected || data[count - 1] != expected) fail("wrong result of ", operation);
}

static void check(const char* operation, const float* data, const float* gathered, long count, long iteration) {
  if (strcmp(operation, "all_reduce") == 0) {
    float sum = 0;
    for (int r = 0; r < size; ++r) sum += contribution(iteration, r);
    check_ends(data, count, sum, operation);
  } else if (strcmp(operation, "broadcast") == 0) {
    check_ends(data, count, contribution(iteration, 0), operation);
  } else if (strcmp(operation, "all_gather") == 0) {
    for (int r = 0; r < size; ++r) check_ends(gathered + r * count, count, contribution(iteration, r), operation);
  }
}

static void print_list(FILE* out, const char* name, const int64_t* values, long count) {
  fprintf(out, "\"%s\": [", name);
  for (long i = 0; i < count; ++i) fprintf(out, "%s%lld", i == 0 ? "" : ", ", (long long)values[i]);
  fprintf(out, "]");
}

static void measure(const char* line, FILE* out) {
  static struct buffer input, output;
  char operation[32], more;
  long bytes, iterations, warmup;
  if (sscanf(line, "%31s %ld %ld %ld %c", operation, &bytes, &iterations, &warmup, &more) != 4 || bytes < 0 ||
      bytes % 4 != 0 || iterations <= 0 || warmup < 0) {
    fail("not a benchmark command: ", line);
  }
  const int is_barrier = strcmp(operation, "barrier") == 0, is_reduce = strcmp(operation, "all_reduce") == 0,
            is_broadcast = strcmp(operation, "broadcast") == 0, is_gather = strcmp(operation, "all_gather") == 0;
  if (!is_barrier && !is_reduce && !is_broadcast && !is_gather) fail("there is no operation ", operation);
  if (!is_barrier && bytes == 0) fail("the size is 0 bytes in ", line);
  if (is_gather && bytes % (4 * size) != 0) fail("the size must be a multiple of 4 bytes for each rank: ", line);
  const long count = bytes / 4 / (is_gather ? size : 1); /* the size is that of a rank's larger side */
  float* data = is_barrier ? NULL : first(&input, count * 4);
  float* gathered = is_gather ? first(&output, bytes) : NULL;
  const int with_cpu = bytes >= cpu_time_from_bytes;
  int64_t* wall = malloc(2 * sizeof *wall * (size_t)iterations);
  if (wall == NULL) fail("out of memory", "");
  int64_t* cpu = wall + iterations;

  for (long i = -warmup; i < iterations; ++i) {
    if (data != NULL) fill(data, count, contribution(i + warmup, rank));
    MPI_Barrier(MPI_COMM_WORLD);
    const int64_t cpu_begin = with_cpu ? now(CLOCK_PROCESS_CPUTIME_ID) : 0;
    const int64_t begin = now(CLOCK_MONOTONIC);
    if (is_barrier) MPI_Barrier(MPI_COMM_WORLD);
    if (is_reduce) MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (is_broadcast) MPI_Bcast(data, (int)count, MPI_FLOAT, 0, MPI_COMM_WORLD);
    if (is_gather) MPI_Allgather(data, (int)count, MPI_FLOAT, gathered, (int)count, MPI_FLOAT, MPI_COMM_WORLD);
    const int64_t end = now(CLOCK_MONOTONIC);
    if (i >= 0) {
      wall[i] = end - begin;
      cpu[i] = with_cpu ? now(CLOCK_PROCESS_CPUTIME_ID) - cpu_begin : 0;
    }
    check(operation, data, gathered, count, i + warmup);
  }
  fprintf(out, "{");
  print_list(out, "wall", wall, iterations);
  fprintf(out, ", ");
  print_list(out, "cpu", cpu, with_cpu ? iterations : 0);
  fprintf(out, "}\n");
  fflush(out);
  free(wall);
}

static void serve(const char* channel) {
  char path[4096], line[256];
  snprintf(path, sizeof path, "%s/%d.commands", channel, rank);
  FILE* commands = fopen(path, "r");
  if (commands == NULL) fail("cannot open ", path);
  snprintf(path, sizeof path, "%s/%d.answers", channel, rank);
  FILE* answers = fopen(path, "w");
  if (answers == NULL) fail("cannot open ", path);
  fprintf(answers, "{\"ready\": true}\n");
  fflush(answers);
  while (fgets(line, sizeof line, commands) != NULL && strcmp(line, "quit\n") != 0) measure(line, answers);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const char* channel = getenv("LOCKSTEP_BENCH_CHANNEL");
  if (argc == 5) {
    char line[256];
    snprintf(line, sizeof line, "%s %s %s %s", argv[1], argv[2], argv[3], argv[4]);
    measure(line, stdout);
  } else if (channel != NULL && argc == 1) {
    serve(channel);
  } else {
    fail("nothing to measure; do: scripts/bench, or give OPERATION BYTES ITERATIONS WARMUP", "");
  }
  MPI_Finalize();
  return 0;
}
