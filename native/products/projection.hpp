// The matrix products of a step: rows times a weight in any packing, and several such products with the same rows. They
// are divided into numbered tasks, so that the products of many experts can share one queue.
#pragma once

#include <algorithm>

#include "step/forward.hpp"
#include "builds/dispatch.hpp"

namespace quire {

// The product of rows with one weight.
class Product {
  public:
    Product() = default;

    Product(const Linear& linear, const float* rows, float* out, int64_t width, int64_t num_rows, char* scratch)
        : is_panels_(linear.packing == kPanels), is_integer_(linear.arithmetic == int64_t(ComputeType::integer)),
          panels_(chosen_kernels().panels),
          products_(is_panels_ ? nullptr : &chosen_products(static_cast<WeightType>(linear.packing))),
          panel_call_{{static_cast<Format>(linear.format), linear.num_out, linear.num_in, linear.group},
                      static_cast<const uint8_t*>(linear.packed), rows, linear.num_in, linear.bias, out, width,
                      num_rows, scratch},
          call_{rows, linear.num_in, linear.packed, linear.bias, out, width, num_rows, linear.num_in, linear.num_out,
                scratch} {}

    int64_t scratch_bytes() const {
        if (!is_panels_) return products_->scratch_bytes(call_.num_rows, call_.num_in);
        const ComputeType arithmetic = is_integer_ ? ComputeType::integer : ComputeType::floating;
        return panels_->scratch_bytes(arithmetic, call_.num_rows, call_.num_in);
    }

    // The number of rows to convert, including padding rows after the last row.
    int64_t num_converted_rows() const {
        if (is_panels_) return is_integer_ ? call_.num_rows : 0;
        return products_->num_converted_rows(call_);
    }

    void convert_input_row(int64_t row, int64_t first, int64_t end) const {
        if (is_panels_)
            panels_->convert_input_row(panel_call_, row, first, end);
        else
            products_->convert_input_row(call_, row, first, end);
    }

    int64_t num_tasks() const {
        if (!is_panels_) return products_->num_tasks(call_);
        return is_integer_ ? panels_->integer_tasks(panel_call_) : panels_->floating_tasks(panel_call_);
    }

    void multiply(int64_t task) const {
        if (!is_panels_) return products_->multiply(call_, task);
        (is_integer_ ? panels_->integer : panels_->floating)(panel_call_, task);
    }

  private:
    bool is_panels_ = false, is_integer_ = false;
    const PanelProducts* panels_ = nullptr;
    const Products* products_ = nullptr;
    PanelCall panel_call_ = {};
    ProductCall call_ = {};
};

// Several products with the same rows; their outputs are adjacent in rows of `width` elements.
class ProjectionSet {
  public:
    ProjectionSet() = default;

    ProjectionSet(const Linear* linears, int count, const float* rows, float* out, int64_t width, int64_t num_rows,
          char* scratch) {
        for (const Linear* linear = linears; linear < linears + count; ++linear) {
            if (linear->num_out == 0) continue;
            char* own = scratch == nullptr ? nullptr : scratch + scratch_bytes_;
            products_[count_] = {*linear, rows, out, width, num_rows, own};
            out += linear->num_out;
            scratch_bytes_ += whole_lines(products_[count_].scratch_bytes());
            num_ready_rows_ = std::max(num_ready_rows_, products_[count_].num_converted_rows());
            num_tasks_ += products_[count_++].num_tasks();
        }
    }

    int64_t scratch_bytes() const { return scratch_bytes_; }
    int64_t num_converted_rows() const { return num_ready_rows_; }
    int64_t num_tasks() const { return num_tasks_; }

    void convert_input_row(int64_t row, int64_t first, int64_t end) const {
        for (int at = 0; at < count_; ++at)
            if (row < products_[at].num_converted_rows()) products_[at].convert_input_row(row, first, end);
    }

    void multiply(int64_t task) const {
        for (int at = 0; at < count_; ++at) {
            const int64_t own = products_[at].num_tasks();
            if (task < own) return products_[at].multiply(task);
            task -= own;
        }
    }

  private:
    Product products_[4];
    int count_ = 0;
    int64_t scratch_bytes_ = 0, num_ready_rows_ = 0, num_tasks_ = 0;
};

}  // namespace quire
