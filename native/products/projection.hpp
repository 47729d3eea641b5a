// Projections, the matrix products of a step: rows times a weight in any packing, and sets of them with the same rows.
// They are divided into numbered tasks, so that the products of many experts can share one queue.
#pragma once

#include <algorithm>

#include "step/forward.hpp"
#include "builds/dispatch.hpp"

namespace quire {

// The product of rows with one weight.
class Projection {
  public:
    Projection() = default;

    Projection(const Linear& linear, const float* rows, float* out, int64_t width, int64_t num_rows, char* scratch)
        : is_panels_(linear.packing == kPanels), is_integer_(linear.arithmetic == int64_t(ComputeType::integer)),
          panel_kernels_(active_kernels().panels),
          kernels_(is_panels_ ? nullptr : &active_matmul(static_cast<WeightType>(linear.packing))),
          panel_call_{{static_cast<Format>(linear.format), linear.num_out, linear.num_in, linear.group},
                      static_cast<const uint8_t*>(linear.packed), rows, linear.num_in, linear.bias, out, width,
                      num_rows, scratch},
          call_{rows, linear.num_in, linear.packed, linear.bias, out, width, num_rows, linear.num_in, linear.num_out,
                scratch} {}

    int64_t scratch_bytes() const {
        if (!is_panels_) return kernels_->scratch_bytes(call_.num_rows, call_.num_in);
        const ComputeType arithmetic = is_integer_ ? ComputeType::integer : ComputeType::floating;
        return panel_kernels_->scratch_bytes(arithmetic, call_.num_rows, call_.num_in);
    }

    // The number of rows to convert, including padding rows after the last row.
    int64_t num_converted_rows() const {
        if (is_panels_) return is_integer_ ? call_.num_rows : 0;
        return kernels_->num_converted_rows(call_);
    }

    void convert_input_row(int64_t row, int64_t first, int64_t end) const {
        if (is_panels_)
            panel_kernels_->convert_input_row(panel_call_, row, first, end);
        else
            kernels_->convert_input_row(call_, row, first, end);
    }

    int64_t num_tasks() const {
        if (!is_panels_) return kernels_->num_tasks(call_);
        return is_integer_ ? panel_kernels_->integer_tasks(panel_call_) : panel_kernels_->floating_tasks(panel_call_);
    }

    void multiply(int64_t task) const {
        if (!is_panels_) return kernels_->multiply(call_, task);
        (is_integer_ ? panel_kernels_->integer : panel_kernels_->floating)(panel_call_, task);
    }

  private:
    bool is_panels_ = false, is_integer_ = false;
    const PanelKernels* panel_kernels_ = nullptr;
    const MatmulKernels* kernels_ = nullptr;
    PanelCall panel_call_ = {};
    MatmulCall call_ = {};
};

// Several projections of the same rows; their outputs are adjacent in rows of `width` elements.
class ProjectionSet {
  public:
    ProjectionSet() = default;

    ProjectionSet(const Linear* linears, int count, const float* rows, float* out, int64_t width, int64_t num_rows,
          char* scratch) {
        for (const Linear* linear = linears; linear < linears + count; ++linear) {
            if (linear->num_out == 0) continue;
            char* projection_scratch = scratch == nullptr ? nullptr : scratch + scratch_bytes_;
            projections_[count_] = {*linear, rows, out, width, num_rows, projection_scratch};
            out += linear->num_out;
            scratch_bytes_ += pad_to_line(projections_[count_].scratch_bytes());
            num_converted_rows_ = std::max(num_converted_rows_, projections_[count_].num_converted_rows());
            num_tasks_ += projections_[count_++].num_tasks();
        }
    }

    int64_t scratch_bytes() const { return scratch_bytes_; }
    int64_t num_converted_rows() const { return num_converted_rows_; }
    int64_t num_tasks() const { return num_tasks_; }

    void convert_input_row(int64_t row, int64_t first, int64_t end) const {
        for (int i = 0; i < count_; ++i)
            if (row < projections_[i].num_converted_rows()) projections_[i].convert_input_row(row, first, end);
    }

    void multiply(int64_t task) const {
        for (int i = 0; i < count_; ++i) {
            const int64_t num_own_tasks = projections_[i].num_tasks();
            if (task < num_own_tasks) return projections_[i].multiply(task);
            task -= num_own_tasks;
        }
    }

  private:
    Projection projections_[4];
    int count_ = 0;
    int64_t scratch_bytes_ = 0, num_converted_rows_ = 0, num_tasks_ = 0;
};

}  // namespace quire
