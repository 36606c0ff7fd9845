// DeepSpeed's allreduce in shared memory as functions of C, for peers.py: with its own source, csrc/cpu/comm/shm.cpp.
#include "shm.cpp"

extern "C" {
void deepspeed_begin(int size, int rank, char* name) {
    static char empty[1] = "";
    shm_initialize(size, rank, name, empty);
}

void deepspeed_unlink(int rank, const char* name) {
    char path[NAME_BUF_SIZE];
    snprintf(path, NAME_BUF_SIZE, "%s_%d_%s__%d", SHM_BUFFER_NAME, getuid(), name, rank);
    shm_unlink(path);
}

void deepspeed_allreduce(float* x, float*, size_t n) {
    auto data = torch::from_blob(x, {(long)n}, torch::kFloat32);
    all_reduce_outer_loop(data, n, (int)(n * sizeof(float)));
}
}
