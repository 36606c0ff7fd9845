// The collectives of oneCCL on host memory, float32, as functions of C: for peers.py.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <oneapi/ccl.hpp>
#include <vector>

static std::unique_ptr<ccl::communicator> comm;
static ccl::shared_ptr_class<ccl::kvs> meeting;
static std::vector<size_t> counts;

extern "C" {
// The address where the ranks meet, of 256 bytes, which rank 0 makes and sends to the others.
void oneccl_address(char* address) {
    static_assert(ccl::kvs::address_max_size == 256);
    ccl::init();
    meeting = ccl::create_main_kvs();
    auto made = meeting->get_address();
    std::copy(made.begin(), made.end(), address);
}

void oneccl_begin(int size, int rank, const char* address) {
    if (rank) {
        ccl::init();
        ccl::kvs::address_type given;
        std::copy(address, address + given.size(), given.begin());
        meeting = ccl::create_kvs(given);
    }
    comm = std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, meeting));
    counts.resize(size);
}

void oneccl_end() { comm.reset(); }

// n: elements of the whole buffer of an allreduce or a broadcast, else of the part of a rank.
void oneccl_allreduce(const float* x, float* out, size_t n) {
    ccl::allreduce(x, out, n, ccl::datatype::float32, ccl::reduction::sum, *comm).wait();
}

void oneccl_broadcast(float* x, float*, size_t n) {
    ccl::broadcast(x, n, ccl::datatype::float32, 0, *comm).wait();
}

void oneccl_reduce_scatter(const float* x, float* out, size_t n) {
    ccl::reduce_scatter(x, out, n, ccl::datatype::float32, ccl::reduction::sum, *comm).wait();
}

void oneccl_allgather(const float* x, float* out, size_t n) {
    std::fill(counts.begin(), counts.end(), n);
    ccl::allgatherv(x, n, out, counts, ccl::datatype::float32, *comm).wait();
}

void oneccl_alltoall(const float* x, float* out, size_t n) {
    ccl::alltoall(x, out, n, ccl::datatype::float32, *comm).wait();
}
}
