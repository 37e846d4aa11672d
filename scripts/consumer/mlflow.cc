// Shows that the installed component mlflow can be built against and run: a store that is no server is
// refused.
#include <iostream>

#include <c10/util/Exception.h>

#include <lockstep/mlflow/mlflow_writer.h>

int main() try {
  const lockstep::MlflowWriter writer({.tracking_uri = "sqlite:///mlflow.db"});
} catch (const c10::Error& error) {
  std::cout << "refused: " << error.what_without_backtrace() << '\n';
}
