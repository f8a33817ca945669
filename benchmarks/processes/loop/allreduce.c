/* The loop that MPI ranks are measured against: all-reduces of float, one after the
   other. Arguments: bytes of the buffer, and how many all-reduces a batch has. Rank 0
   prints the seconds that one took, a line for each of five batches after a first one
   that does not count. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
  int rank;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  long bytes = argc > 2 ? atol(argv[1]) : 0, times = argc > 2 ? atol(argv[2]) : 0;
  if (bytes < 4 || times < 1) {
    fprintf(stderr, "allreduce BYTES TIMES\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  int n = (int)(bytes / 4);
  float *in = malloc(bytes), *out = malloc(bytes);
  if (!in || !out) {
    fprintf(stderr, "allreduce: no memory\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  for (int i = 0; i < n; i++) in[i] = out[i] = 1;
  for (int batch = 0; batch < 6; batch++) {
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    for (long i = 0; i < times; i++) MPI_Allreduce(in, out, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    double took = (MPI_Wtime() - began) / times;
    if (rank == 0 && batch > 0) printf("%.9g\n", took);
  }
  MPI_Finalize();
  return 0;
}
