/* MPI_Finalize of a library that is linked below: one rank does not come out of it in good
   order, in the way that the environment names. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int PMPI_Finalize(void);

static int chosen(void) {
  const char *rank = getenv("OMPI_COMM_WORLD_RANK"), *who = getenv("SPILLWAY_TEST_FINALIZE_RANK");
  if (!rank) rank = getenv("PMI_RANK");
  return rank && who && !strcmp(rank, who);
}

int MPI_Finalize(void) {
  const char *how = getenv("SPILLWAY_TEST_FINALIZE");
  if (!how || !chosen()) return PMPI_Finalize();
  if (!strcmp(how, "fail")) return 16;
  if (!strcmp(how, "die")) kill(getpid(), SIGKILL);
  if (!strcmp(how, "stop")) kill(getpid(), SIGSTOP);
  if (!strcmp(how, "late")) PMPI_Finalize(); /* the others are through */
  for (;;) pause();
}
